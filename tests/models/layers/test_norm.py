"""RMS norms against transformers', to the bit."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from compiled_llm.models.layers.norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ways_to_round(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    for theirs, own in ((LlamaRMSNorm(48, eps=1e-5), weight), (Gemma2RMSNorm(48, eps=1e-5), 1 + weight.float())):
        theirs.weight.data = weight
        got = rms_norm(x, own, 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got, theirs(x), atol=0, rtol=1e-6 if dtype == torch.float32 else 0)
