"""Fixtures of the tests of the CPU's attention kernels."""

import pytest
import torch

from compiled_llm.ops import native
from tests.ops.attention.cpu_kernel import Attend, attend_on
from tests.ops.instruction_sets import skip_without


@pytest.fixture
def attend(kernels: native.Kernels, request: pytest.FixtureRequest) -> Attend:
    """As ``attend_on``; tests that are parametrised with ``every_set`` give it each instruction set."""
    isa = getattr(request, "param", None)
    if isa is not None:
        skip_without(kernels, isa)
    if isa == "amx_in_software" and "amx" in kernels.supported_isas():
        pytest.skip("the same bits as the CPU's own AMX: test_software_tiles_are_those_of_the_cpu")
    return attend_on(kernels, isa, latent=request.module.OP == "latent_attention_cpu")


@pytest.fixture
def two_threads() -> None:
    torch.set_num_threads(2)
