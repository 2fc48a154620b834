"""Models with latent attention in a whole engine: transformers' tokens, and the same bits whatever comes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.packed import Packed
from tests.e2e.test_published import differences, outputs_of
from tests.families import CONFIGS, checkpoint, strengthened, transformers_model
from tests.models.steps import check_every_position

FAMILIES = ("deepseek-v3", *(pytest.param(name, marks=pytest.mark.battery) for name in ("deepseek-v2", "mistral4")))
LENGTHS = (61, 90, 47, 70, 55)
LONG = 600


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 307, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_through_preemptions(name: str) -> None:
    model = transformers_model(name)
    for output in outputs_of(checkpoint(name), prompts(), "auto"):
        difference, lead = differences(output, model)
        assert difference.abs().max() < 1e-3
        assert lead.min() > -1e-3, "another token was likelier, and not by a rounding"


def results(name: str, **changes: Any) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Tokens and log-probabilities of all requests, and how many preemptions there were."""
    sizes: dict[str, Any] = {
        "bucket_sizes": (4,),
        "token_bucket_sizes": (64,),
        "max_model_len": 144,
        "enforce_eager": True,
    }
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    with CompiledEngine(str(checkpoint(name)), **{"dtype": "bfloat16", **sizes, **changes}) as engine:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False)
        found = []
        for output in outputs:
            tokens, rows = output.outputs[0].token_ids, output.outputs[0].logprobs
            assert rows is not None
            found.append((tokens, [row[token].logprob for row, token in zip(rows, tokens, strict=True)]))
        return found, engine.stats().num_preemptions


@pytest.mark.parametrize(
    "kv_cache_dtype", [*(pytest.param(x, marks=pytest.mark.battery) for x in ("auto", "fp8")), "int8"]
)
def test_chunks_batches_and_preemptions_change_no_bit(kv_cache_dtype: str) -> None:
    at_ease, none = results("deepseek-v3", num_kv_blocks=64, kv_cache_dtype=kv_cache_dtype)
    assert none == 0
    alone, _ = results("deepseek-v3", num_kv_blocks=64, kv_cache_dtype=kv_cache_dtype, bucket_sizes=(1,))
    assert alone == at_ease
    for mode in ("recompute", "swap"):
        tight: dict[str, Any] = {"num_kv_blocks": 20, "token_bucket_sizes": (16, 64)}
        if mode == "swap":
            tight["swap_space_bytes"] = 2**20
        pressed, some = results("deepseek-v3", kv_cache_dtype=kv_cache_dtype, preemption_mode=mode, **tight)
        assert some > 0
        assert pressed == at_ease


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.battery)])
def test_quantised_weights_serve_nearly_the_same(quantization: str) -> None:
    plain, _ = results("deepseek-v3", num_kv_blocks=64)
    rounded, _ = results("deepseek-v3", num_kv_blocks=64, quantization=quantization)
    first = [abs(one[1][0] - other[1][0]) for one, other in zip(plain, rounded, strict=True)]
    assert 0 < sum(first) / len(first) < (0.3 if quantization == "int8" else 3)


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("mistral4", marks=pytest.mark.battery)])
@pytest.mark.filterwarnings("ignore")
def test_every_position_of_600_tokens(name: str, tmp_path: Path) -> None:
    class_name, fields = CONFIGS[name]
    config_class = getattr(transformers, class_name).config_class
    torch.manual_seed(0)
    theirs = getattr(transformers, class_name)(
        config_class(**{**copy.deepcopy(fields), "max_position_embeddings": 640, "initializer_range": 0.1})
    )
    model = strengthened(theirs.eval())
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 307, (LONG,)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0]
    config = read_config(tmp_path)
    weights = loader.load_weights(tmp_path, config, torch.float32, torch.device("cpu"), Packed)
    check_every_position(config, weights, prompt, wanted, (7, 301, 302, 555), shared=400)
