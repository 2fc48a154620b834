"""Who asks for programmatic launches, and on a GPU, that nothing is read before it is written.

That kernels wait before anything else is read in their machine code, see ``tests/gpu_step``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from compiled_llm.compiling.cuda_graphs import CapturedFunction, GraphPool
from compiled_llm.ops.linear import triton_linear, triton_quantized, triton_quantized_a8
from compiled_llm.ops.linear.quantized_weight import WeightFormat
from compiled_llm.ops.moe import triton_grouped
from compiled_llm.ops.programmatic_launch import CAPABILITY, MOST_ROWS, launch_options, programmatic_launches
from compiled_llm.ops.triton_programmatic import wait_for_launches_before
from tests.ops import ahead_of_time
from tests.ops.linear.test_triton_quantized import packed

ORDINARY = {"PROGRAMMATIC": False}
ALLOWED = {"PROGRAMMATIC": True, "launch_pdl": True}


def test_they_are_allowed_within_the_block_alone() -> None:
    assert launch_options(1) == ORDINARY
    with programmatic_launches():
        assert launch_options(1) == ALLOWED
        with programmatic_launches(False):
            assert launch_options(1) == ORDINARY
        assert launch_options(1) == ALLOWED
    assert launch_options(1) == ORDINARY


def test_launches_of_many_rows_are_ordinary() -> None:
    with programmatic_launches():
        assert launch_options(MOST_ROWS) == ALLOWED
        assert launch_options(MOST_ROWS + 1) == ORDINARY


def test_after_an_error_they_are_not_allowed() -> None:
    with pytest.raises(RuntimeError, match="capture"), programmatic_launches():
        raise RuntimeError("capture")
    assert launch_options(1) == ORDINARY


def test_another_thread_does_not_have_them() -> None:
    with programmatic_launches(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch_options, 1).result() == ORDINARY


# -- On a GPU


@triton.jit
def _late_kernel(source, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Lets the next launch start, and writes 100 us later."""
    wait_for_launches_before()
    end = globaltimer() + 100_000
    now = globaltimer()
    while now < end:
        now = globaltimer()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(source + places, mask=places < COUNT), mask=places < COUNT)


def _write_late(source: Tensor, out: Tensor) -> None:
    _late_kernel[(4,)](
        source, out, COUNT=source.numel(), BLOCK=triton.next_power_of_2(source.numel()) // 4, num_warps=4,
        enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip


def test_the_late_kernel_compiles() -> None:
    x = ahead_of_time.empty(2, 512)
    constants = {"COUNT": 1024, "BLOCK": 256, "enable_fp_fusion": False, "launch_pdl": True}
    ptx = ahead_of_time.compiled((_late_kernel, (x, x), constants), CAPABILITY).asm["ptx"]
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("st.global")


def quantised(module: object, x: Tensor) -> Callable[[Tensor], Tensor]:
    weight, _ = packed(WeightFormat("int4", 128), 256, x.shape[1])
    given = [None if tensor is None else tensor.to(x.device) for tensor in weight]
    if module is triton_quantized:
        return lambda x: triton_quantized.quantized_linear(x, *given, None, "int4", 128, 256)
    return lambda x: triton_quantized_a8.quantized_linear_a8(x, *given, None, None, False, "int4", 128, 256)


def op_of(name: str, x: Tensor) -> Callable[[Tensor], Tensor]:
    if name.startswith("int4"):
        return quantised(triton_quantized if name == "int4" else triton_quantized_a8, x)
    weight = torch.randn(256, x.shape[1], device=x.device).to(x.dtype)
    if name == "plain":
        return lambda x: triton_linear.exact_linear(x, weight, None, None, "silu")
    starts = torch.arange(3, dtype=torch.int32, device=x.device)  # a row for each of two experts
    return lambda x: triton_grouped.grouped_linear(x, weight.view(2, -1, x.shape[1]), None, None, starts)


@pytest.mark.gpu
@pytest.mark.parametrize("between", ["nothing", "a copy", "a product", "another op"])
@pytest.mark.parametrize("name", ["plain", "int4", "int4, int8 activations", "experts"])
def test_nothing_is_read_before_it_is_written(name: str, between: str) -> None:
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("this GPU has no programmatic launches")
    source = torch.randn(2, 512, device="cuda").bfloat16()
    x, copied = torch.zeros_like(source), torch.zeros_like(source)
    unit = torch.eye(512, device="cuda").bfloat16()
    op = op_of(name, source)
    first = op_of("plain", source)

    def call(_: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        _write_late(source, x)
        if between == "a copy":
            copied.copy_(x)
        elif between == "a product":
            torch.mm(x, unit, out=copied)
        elif between == "another op":
            first(x)
        return op(copied if between in ("a copy", "a product") else x)

    captured, inputs = CapturedFunction(GraphPool(torch.device("cuda"), programmatic=True)), (x,)
    captured.capture(call, (source, inputs))
    expected = op(source)
    for _ in range(20):
        x.fill_(float("nan"))
        copied.fill_(float("nan"))
        assert torch.equal(captured(source, inputs), expected)
        source.copy_(torch.randn_like(source))
        expected = op(source)
