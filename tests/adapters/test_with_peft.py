"""Adapters that PEFT itself makes and saves, against its own forward; where PEFT is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, LoRARequest
from tests.e2e.test_lora import LORA, PARAMS, PROMPTS, SIZES, logprobs_of
from tests.families import checkpoint, logits_of, transformers_model

CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "root": {"r": 8, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 2, "lora_alpha": 16, "target_modules": ["down_proj", "gate_proj", "k_proj"],
        "rank_pattern": {"down_proj": 5}, "alpha_pattern": {r"layers\.1\.mlp\.gate_proj": 4},
    },
    "expression": {"target_modules": r".*\.layers\.[0-9]+\.mlp\.(up|down)_proj", "init_lora_weights": "gaussian"},
    "layers": {"target_modules": ["o_proj"], "layers_to_transform": [1], "exclude_modules": ["mlp.up_proj"]},
}  # fmt: skip


@pytest.mark.battery
@pytest.mark.filterwarnings("ignore::FutureWarning")  # between PEFT and transformers
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["qwen3", "llama-biases", "gemma3"])
def test_log_probabilities_are_those_of_peft(name: str, case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(transformers_model(name), peft.LoraConfig(**CASES[case])).eval()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    with CompiledEngine(str(checkpoint(name)), dtype="float32", **SIZES, **LORA) as engine:
        request = LoRARequest("x", str(tmp_path))
        (output,) = engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
    tokens = torch.tensor([PROMPTS[0] + output.outputs[0].token_ids])
    reference = torch.log_softmax(logits_of(model, tokens)[0], -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), reference, atol=1e-4, rtol=0)
