"""An op that is declared here has what its declaration says, with and without its C++ library."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import library, native

ARGUMENTS = "(Tensor x, Tensor(a!) count, float by)"


def plus(x: Tensor, count: Tensor, by: float) -> Tensor:
    count += 1
    return x + by


@pytest.fixture(scope="module")
def op() -> SimpleNamespace:
    on_cpu = torch.library.Library("compiled_llm", "IMPL")

    def load(name: str) -> bool:
        """As the C++ library "plus_cpu" does: it registers its kernels itself."""
        assert name == "plus_cpu"
        on_cpu.impl("declared", lambda x, count, by: x + 2 * by, "CPU")
        return True

    place = "pinned:on_device"  # has no Triton kernels
    library.define_op(
        f"declared{ARGUMENTS} -> Tensor", reference=plus, fake=library.like_first, cpu="plus_cpu",
        gpu=library.on_gpu(place), gpu_exact=library.on_gpu(place),
    )  # fmt: skip
    return SimpleNamespace(load=load)


def test_without_a_compiler_it_is_its_reference_and_with_one_its_kernel(
    op: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared, exact = torch.ops.compiled_llm.declared, torch.ops.compiled_llm.declared_exact
    x, count = torch.arange(3.0), torch.zeros(1)
    monkeypatch.setattr(native, "load", lambda name: None)
    assert torch.equal(declared(x, count, 0.5), x + 0.5)
    assert torch.equal(exact(x, count, 0.5), x + 0.5)
    assert count == 2
    torch.library.opcheck(declared.default, (x, count, 0.5))
    monkeypatch.setattr(native, "load", op.load)
    assert torch.equal(declared(x, count, 0.5), x + 1)
    monkeypatch.delattr(native, "load")  # from now on nothing asks for it
    assert torch.equal(declared(x, count, 0.5), x + 1)
    assert torch.equal(exact(x, count, 0.5), x + 1)


def test_it_has_kernels_and_a_fake_for_both_names(op: SimpleNamespace) -> None:
    for name in ("compiled_llm::declared", "compiled_llm::declared_exact"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        made = getattr(torch.ops.compiled_llm, name[14:])(*torch.empty(2, 5, device="meta"), 1.0)
        assert (made.shape, made.device.type) == ((5,), "meta")


def test_the_ops_on_a_cpu_are_those_of_their_libraries() -> None:
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    of = {"attention_cpu": "paged_attention", "linear_cpu": "grouped_packed_linear", "rowwise_cpu": "weighted_sum"}
    for name, op in (of | {"sampling_cpu": "greedy_tokens", "recurrent_cpu": "mamba2_scan"}).items():
        native.load(name)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"compiled_llm::{op}", "CPU")


def test_what_gpus_run_is_there() -> None:
    """Without a GPU nobody calls it."""
    pytest.importorskip("triton")
    files = Path(library.__file__).parent.rglob("*.py")
    places = {place for file in files for place in re.findall(r'on_gpu\(\s*"([\w.]+:\w+)"', file.read_text())}
    assert len(places) > 20
    for module, function in (place.split(":") for place in places):
        assert callable(getattr(importlib.import_module(f"compiled_llm.ops.{module}"), function))
