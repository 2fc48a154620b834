"""Fixtures of the tests of the CPU's attention kernel."""

from collections.abc import Iterator

import pytest
import torch

from compiled_llm.ops import native
from tests.ops.attention.cpu_kernel import Attend, attend_on
from tests.ops.instruction_sets import skip_without


@pytest.fixture(scope="module")
def kernels() -> native.Kernels:
    module = native.load("attention_cpu")
    if module is None:
        pytest.skip("no C++ compiler")
    return module


@pytest.fixture
def attend(kernels: native.Kernels, request: pytest.FixtureRequest) -> Attend:
    """As ``attend_on``; tests that are parametrised with ``every_set`` give it each instruction set."""
    isa = getattr(request, "param", None)
    if isa is not None:
        skip_without(kernels, isa)
    if isa == "amx_in_software" and "amx" in kernels.supported_isas():
        pytest.skip("the same bits as the CPU's own AMX: test_software_tiles_are_those_of_the_cpu")
    return attend_on(kernels, isa)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
