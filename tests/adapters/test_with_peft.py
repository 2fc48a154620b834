"""Adapters that PEFT itself makes and saves, against its own forward, merged and not; where PEFT is installed."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_llm import CompiledEngine, LoRARequest
from tests.drawn import marked
from tests.e2e.test_lora import LORA, PARAMS, PROMPTS, SIZES, logprobs_of
from tests.families import checkpoint, logits_of, transformers_model
from tests.models.fallback.test_architectures import save

# Dense ones, tied and not, with biases and transposed weights; experts of each layout; states; latents; and, behind a
# colon, models through transformers' code.
FAMILIES = (
    "llama-biases", "qwen3", "gemma3", "gpt2", "phi3", "qwen3-moe", "mixtral", "gpt-oss", "gemma4-moe", "deepseek-v3",
    "mistral4", "qwen3-next", "granite-hybrid-moe", "nemotron-h-moe", "lfm2-moe", ":olmoe", ":qwen2_moe", ":gemma",
)  # fmt: skip
ORDINARY = ("qwen3", "gpt-oss", "deepseek-v3")
# Of transformers' code: routers that are no linear layers, embeddings whose parameter it reads.
NOT_SERVED = {
    ":olmoe": ("gate.weight",), ":qwen2_moe": ("gate.weight",), ":gemma": ("embed_tokens", "lm_head"),
    "nemotron-h-moe": ("out_proj",),  # which PEFT refuses
}  # fmt: skip
ALL = ("all-linear", "embed_tokens", "lm_head")
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "root": ("qwen3", {"r": 8, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}, ()),
    "patterns": (
        "qwen3",
        {
            "r": 2, "lora_alpha": 16, "target_modules": ["down_proj", "gate_proj", "k_proj"],
            "rank_pattern": {"down_proj": 5}, "alpha_pattern": {r"layers\.1\.mlp\.gate_proj": 4},
        },
        (),
    ),
    "patterns of experts": (
        "qwen3-moe",
        {
            "target_modules": [], "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
            "r": 2, "rank_pattern": {"gate_up_proj": 3}, "alpha_pattern": {"down_proj": 4},
        },
        ("experts",),
    ),
    "expression": (
        "gemma3",
        {"target_modules": r".*\.layers\.[0-9]+\.mlp\.(up|down)_proj", "init_lora_weights": "gaussian"},
        (),
    ),
    "layers": (
        "llama-biases",
        {"target_modules": ["o_proj"], "layers_to_transform": [1], "exclude_modules": ["mlp.up_proj"]},
        (),
    ),
    "tokens": ("llama-biases", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 300]}, ALL),
    "tokens of both": (
        "llama-biases",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [9], "lm_head": [7, 8]}},
        ALL,
    ),
    "tied tokens": ("qwen3", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 300]}, ALL),
    "tied": ("qwen3", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, ALL),
    "not tied": ("qwen3", {"target_modules": ["lm_head", "embed_tokens"], "rank_pattern": {"lm_head": 3}}, ALL),
    "whole": (
        "llama-biases", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, (),
    ),
    "whole head": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, ()),
    "whole embedding": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, ()),
    "whole and tied": (
        "qwen3",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        (),
    ),
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT and transformers, about each other
peft = pytest.importorskip("peft")


def model_of(name: str, directory: Path) -> tuple[nn.Module, Path]:
    """transformers' model and its checkpoint."""
    if not name.startswith(":"):
        return transformers_model(name), checkpoint(name)
    return save(name[1:], directory / "model"), directory / "model"


def all_targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """What ``target_modules`` and ``target_parameters`` may name: ends of the names of each kind of layer.

    Positions are left out.
    """
    modules, parameters = set[str](), set[str]()
    for name, module in model.named_modules():
        end = name.rpartition(".")[2]
        if type(module).__name__ in ("Linear", "Conv1D") or (isinstance(module, nn.Embedding) and end != "wpe"):
            modules.add(end)
        dimensions = 3 if end == "experts" else 2 if type(module).__name__.endswith("Router") else 0
        own = [own for own, tensor in module.named_parameters(recurse=False) if tensor.dim() == dimensions]
        parameters |= {f"{end}.{name}" for name in own}
    return sorted(modules), sorted(parameters)


def adapted(model: nn.Module, directory: Path, **config: Any) -> nn.Module:
    """PEFT's model with random changes, which are saved to ``directory``."""
    torch.manual_seed(0)
    made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config)).eval()
    for name, parameter in made.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # that PEFT begins with zeros in
            parameter.data.normal_(std=0.1)
        if "trainable_tokens_delta" in name or "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    made.save_pretrained(directory)
    return made


def logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    """Of all tokens but the first."""
    ids = torch.tensor([tokens])
    return torch.log_softmax(logits_of(model, ids)[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def check_against_peft(
    engine: CompiledEngine, model: nn.Module, configs: Mapping[str, dict[str, Any]], directory: Path
) -> None:
    """For each of ``configs`` the engine's log-probabilities are those of PEFT's model."""
    for name, config in configs.items():
        theirs = adapted(model, directory / name, **config)
        request = LoRARequest(name, str(directory / name))
        (output,) = engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
        tokens, found = PROMPTS[0] + output.outputs[0].token_ids, torch.tensor(logprobs_of(output))
        close = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        close(found, logprobs(theirs, tokens))
        embeddings = {*config.get("target_modules", ()), *config.get("modules_to_save", ())} & {
            "lm_head",
            "embed_tokens",
            "wte",
        }
        if not (model.config.tie_word_embeddings and embeddings):  # PEFT merges a change of either with both
            close(found, logprobs(theirs.merge_and_unload(), tokens))
        assert (found - logprobs(model, tokens)).abs().max() > 1e-3, f"{name} changes too little to be seen"


def check_family(name: str, each: bool, directory: Path) -> None:
    """Every layer changed at once, or ``each`` kind of layer alone."""
    model, path = model_of(name, directory)
    modules, parameters = all_targets(model)
    left_out = NOT_SERVED.get(name, ())
    modules, parameters = ([end for end in ends if end not in left_out] for ends in (modules, parameters))
    configs = {"all": {"target_modules": modules, "target_parameters": parameters}}
    if each:
        pairs = [["gate_proj", "up_proj"], ["w1", "w3"]] if parameters else []  # PEFT takes none of experts alone
        paired = [pair for pair in pairs if {*pair} <= {*modules}]
        alone = [[end] for end in modules if not any(end in pair for pair in paired)]
        configs = {" ".join(ends): {"target_modules": ends} for ends in alone + paired}
        configs |= {end: {"target_modules": [], "target_parameters": [end]} for end in parameters}
    configs = {name: {"r": 4, "lora_alpha": 8, **config} for name, config in configs.items()}
    with CompiledEngine(str(path), dtype="float32", **SIZES, **LORA, lora_target_modules=("*",)) as engine:
        check_against_peft(engine, model, configs, directory)


@pytest.mark.parametrize("name", marked(FAMILIES, ORDINARY))
def test_all_layers(name: str, tmp_path: Path) -> None:
    check_family(name, False, tmp_path)


@pytest.mark.battery
@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_of_layer(name: str, tmp_path: Path) -> None:
    check_family(name, True, tmp_path)


@pytest.mark.parametrize("case", marked(CASES, ["tied tokens", "whole and tied"]))
def test_configs(case: str, tmp_path: Path) -> None:
    name, config, targets = CASES[case]
    changes: dict[str, Any] = {"lora_target_modules": targets} if targets else {}
    changes |= {"max_lora_modules_to_save": 1} if "modules_to_save" in config else {}
    with CompiledEngine(str(checkpoint(name)), dtype="float32", **SIZES, **LORA, **changes) as engine:
        check_against_peft(engine, transformers_model(name), {"x": config}, tmp_path)
