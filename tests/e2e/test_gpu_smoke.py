"""A minute's look at a GPU: does each part of the engine run at all, and right? The first part of ``gpu_validate.py``.

On a CPU the same cases run at small sizes, so that a GPU's first minute is not lost to a mistake in here.
"""

from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine
from compiled_llm.ops import native
from compiled_llm.ops.sampling import token_sampling  # noqa: F401, it registers the op
from tests.ops.attention import attention_cases
from tests.ops.attention.cpu_kernel import attend_on
from tests.ops.sampling import sampling_cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
_QWEN: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "fused_qkv": True}
_LLAMA = _QWEN | {"num_heads": 32}
_DECODE: dict[str, Any] = {"query_lens": [1] * 4, "context_lens": [700, 255, 16, 0]}
_MIXED: dict[str, Any] = {"query_lens": [1, 90, 17], "context_lens": [300, 0, 33], "trailing_rows": 3}
_BF16 = {"dtype": torch.bfloat16}
ATTENTION: dict[str, dict[str, Any]] = {
    "decode": _QWEN | _DECODE | _BF16,
    "decode of one": _LLAMA | _BF16 | {"query_lens": [1], "context_lens": [1500]},
    "mixed": _QWEN | _MIXED | _BF16,
    "prompt": _LLAMA | _BF16 | {"query_lens": [200], "context_lens": [0]},
    "drafts": _QWEN | _BF16 | {"query_lens": [4, 4], "context_lens": [500, 3]},
    "decode, int8": _QWEN | _DECODE | _BF16 | {"kv_dtype": torch.int8},
    "mixed, int8": _QWEN | _MIXED | _BF16 | {"kv_dtype": torch.int8},
    "decode, fp8": _QWEN | _DECODE | _BF16 | {"kv_dtype": torch.float8_e4m3fn},
    "window, sinks": _QWEN | _MIXED | _BF16 | {"window": 64, "sinks": True},
    "float32": _QWEN | _DECODE,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, device: str) -> None:
    case = ATTENTION[name]
    if device == "cuda" and "fp8" in name and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    if device == "cuda":
        op = torch.ops.compiled_llm.paged_attention
    elif (kernels := native.load("attention_cpu")) is not None:
        op = attend_on(kernels)
    else:
        pytest.skip("no C++ compiler")
    attention_cases.check(attention_cases.make_case(**case, device=device), op)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling(dtype: torch.dtype, device: str) -> None:
    case = sampling_cases.make_case(151936 if device == "cuda" else 5000, rows=32, dtype=dtype)
    most = 0 if device == "cpu" else 2  # a GPU's exponentials are others to the last bit
    sampling_cases.check(case.to(device), torch.ops.compiled_llm.sample_tokens, most_differences=most)


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", {"enforce_eager": True}),
        pytest.param("cuda", {"enforce_eager": True}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"cuda_graphs": "manual"}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"cuda_graphs": "programmatic"}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"cuda_graphs": "trees"}, marks=pytest.mark.gpu),
    ],
)
def test_engine_against_transformers(device: str, mode: dict[str, Any]) -> None:
    """The bundled model in bfloat16: log-probabilities of prompts and of what it generates."""
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (64,)}
    with CompiledEngine(device=device, dtype="bfloat16", **sizes, **mode) as engine:
        report = engine.check(max_tokens=8)
        print(report)
        assert report.without is None, report.without
        assert report.agrees
