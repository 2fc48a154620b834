"""The quantisation of the KV cache, by itself."""

import pytest
import torch

from compiled_llm.ops.attention import kv_quant
from tests.ops.attention.attention_cases import KV_DTYPES, TOLERANCE


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_quantise(dtype: torch.dtype, kv_dtype: str) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0], x[1, 0, 0], x[2, 1, 3], x[3] = 0, float("nan"), float("inf"), 1e-30
    codes, scale = kv_quant.quantise(x, KV_DTYPES[kv_dtype])
    assert codes.dtype == KV_DTYPES[kv_dtype]
    bad = ~x.isfinite().all(-1)
    assert torch.equal(scale.isnan(), bad)
    assert bad.sum() == 2
    assert (scale[~bad] > 0).all()
    error = (kv_quant.dequantise(codes, scale) - x.float()).abs().amax(-1)
    step = {"int8": 0.5 / 127, "fp8": 0.5 * 32 / 448}[kv_dtype]
    assert (error <= x.float().abs().amax(-1) * step * 1.001 + 2.0**-100)[~bad].all()


def test_fp8_needs_a_gpu_that_has_it() -> None:
    for capability in ((7, 5), (8, 0), (8, 6)):
        with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8' needs .* 8\.9 or more, given .*: use 'int8'"):
            kv_quant.check_capability(torch.float8_e4m3fn, capability)
        for dtype in (torch.int8, torch.bfloat16):
            kv_quant.check_capability(dtype, capability)
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        kv_quant.check_capability(torch.float8_e4m3fn, capability)
