"""The row-wise Triton kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.rowwise import reference, triton_rowwise
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.rowwise.rowwise_cases import (
    CASES,
    DTYPES,
    GPU_CASES,
    HEADS,
    KV_HEADS,
    ONES,
    REFUSED,
    check,
    cut,
    extremes,
    numbers,
    outputs,
    weight,
    widened,
)

ALL_CASES = CASES | GPU_CASES


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(name: str, arguments: Callable, dtype: torch.dtype, device: str = "cpu") -> None:
    # Of 8200 elements a norm takes two blocks, and log_sum_exp three; of 1030 what adds nothing up takes two pieces.
    adds_up = "norm" in name or name == "log_sum_exp"
    for size in (2, 24, 64) if name == "rope" else (2, 64, 8200) if adds_up else (24, 1030):
        given = [x.to(device) if isinstance(x, Tensor) else x for x in arguments(dtype, 3, size)]
        got = outputs(getattr(triton_rowwise, name)(*given))
        want = getattr(reference, f"{name}_reference")(*(map(widened, given) if dtype == torch.float32 else given))
        check(got, outputs(want), dtype, is_gelu="gelu" in given or "gelu_tanh" in given)


def a_row_has_the_same_bits_in_any_company(
    name: str, arguments: Callable, dtype: torch.dtype, device: str = "cpu", rows: int = 4, sizes: tuple = (200,)
) -> None:
    for size in sizes:
        given = [x.to(device) if isinstance(x, Tensor) else x for x in arguments(dtype, rows, size)]
        whole = outputs(getattr(triton_rowwise, name)(*given))
        for part in (slice(0, 1), slice(rows - 1, rows), slice(2, rows)):
            alone = outputs(getattr(triton_rowwise, name)(*[cut(x, part) for x in given]))
            assert all(torch.equal(some, every[part]) for some, every in zip(alone, whole, strict=True))


def no_rows_are_no_launch(name: str, arguments: Callable, dtype: torch.dtype) -> None:
    for out in outputs(getattr(triton_rowwise, name)(*arguments(dtype, 0, 64))):
        assert out.shape[0] == 0


def keeps_and_gives(run: Callable, dtype: torch.dtype, size: int) -> None:
    """Of more rows than there are, and of none; the other rows that are kept stay."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    for rows in ([0, 4, 4, 2, 0, 1, 3], [3], []):
        indices, kept = torch.tensor(rows, dtype=torch.int32), torch.full((6, size), 7.0, dtype=dtype)
        assert torch.equal(run(x, indices, kept), x[indices.long()])
        assert torch.equal(kept, torch.cat([x, torch.full_like(x[:1], 7.0)]))
        assert torch.equal(triton_rowwise.table_rows(x, indices), x[indices.long()])


def sums_of_norms_have_the_bits_of_single_ops(norm: torch.dtype) -> None:
    """So that an exact engine may have either."""
    op, size = triton_rowwise, 1300
    x, y = numbers(5, size, torch.bfloat16), numbers(5, size, torch.bfloat16, 3.0)
    y_norm = sum_norm = weight(size, norm)
    total, out = op.sum_of_norms(x, None, y, y_norm, torch.tensor([0.37]), sum_norm, 1e-5)
    expected = op.scaled_sum(x, op.rms_norm(y, y_norm, 1e-5), torch.tensor([0.37]))
    assert torch.equal(total, expected)
    assert torch.equal(out, op.rms_norm(expected, sum_norm, 1e-5))
    together = op.sum_of_norms(x, None, y, y_norm, None, sum_norm, 1e-5)
    assert all(map(torch.equal, together, op.add_rms_norm(x, op.rms_norm(y, y_norm, 1e-5), sum_norm, 1e-5)))


INTERPRETED = {
    **{
        f"{title}-{str(dtype)[6:]}-{function.__name__}": functools.partial(function, *case, dtype)
        for title, case in ALL_CASES.items()
        for dtype in DTYPES
        for function in (agrees_with_the_reference, a_row_has_the_same_bits_in_any_company, no_rows_are_no_launch)
    },
    "extremes": functools.partial(extremes, triton_rowwise),
    "keep rows": functools.partial(keeps_and_gives, triton_rowwise.keep_rows, torch.bfloat16, 4100),
    "sums of norms by bits": functools.partial(sums_of_norms_have_the_bits_of_single_ops, torch.float32),
}


# ---- launched as one binary -----------------------------------------------------------------------------------------


def launch_of(name: str, given: list) -> ahead_of_time.Launch:
    with ahead_of_time.recorded(None, triton_rowwise) as launches:
        getattr(triton_rowwise, name)(*given)
    (launch,) = launches
    return launch


@pytest.mark.parametrize("size", [64, 200])
@pytest.mark.parametrize("title", ALL_CASES)
def test_rows_of_a_length_run_one_binary(title: str, size: int) -> None:
    """However many they are and wherever they lie: the layout of a sum follows from what Triton specialises by."""
    name, arguments = ALL_CASES[title]
    seen = set()
    for rows in (1, 2, 16, 33):
        given = arguments(torch.bfloat16, rows + 1, size)
        for part in ([cut(x, slice(rows)) for x in given], arguments(torch.bfloat16, rows, size)):
            kernel, args, kwargs = launch_of(name, part)
            seen.add((kernel, ahead_of_time.specialisation(args), tuple(kwargs.items())))
    assert len(seen) == 1


# ---- registered -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arguments"), ALL_CASES.values(), ids=ALL_CASES)
def test_a_gpu_runs_the_triton_kernel(name: str, arguments: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would call for tensors of a GPU, called with those of a CPU."""
    calls = []
    reference_of = getattr(reference, f"{name}_reference")
    monkeypatch.setattr(triton_rowwise, name, lambda *args: calls.append(name) or reference_of(*args))
    op = getattr(torch.ops.compiled_llm, name).default
    op._op_dk(torch._C.DispatchKey.CUDA, *arguments(torch.float32, 2, 16))
    assert calls == [name]


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

D, H, INTERMEDIATE, V = 4096, 128, 12288, 151936  # of Qwen3-8B
WIDE = 20480  # takes three blocks of a norm


def compiled_cases(dtype: torch.dtype, norm_dtype: torch.dtype) -> Iterator[tuple[str, list]]:
    x = functools.partial(empty, dtype=dtype)

    for size in (D, WIDE):
        norm = empty(size, dtype=norm_dtype)
        yield "rms_norm", [x(8, size), norm, 1e-6]
        yield "add_rms_norm", [x(8, size), x(8, size), norm, 1e-6]
    for size in (D, WIDE):
        both = [x(size) for _ in range(2)]
        yield "layer_norm", [x(8, size), *both, 1e-6]
        yield "add_layer_norm", [x(8, size), x(8, size), *both, 1e-6]
    for size, group, norm_first in ((D, 128, True), (D, D, False), (WIDE, WIDE, False), (D, 512, False)):
        yield "gated_rms_norm", [x(8, size), x(8, size), x(group), 1e-6, group, norm_first]
    for norms in ([None, None], [empty(H, dtype=norm_dtype) for _ in range(2)]):
        angles = floats(8, H)
        yield "rope", [x(8, (HEADS + 2 * KV_HEADS) * H), angles, *norms, HEADS, KV_HEADS, 1e-6]
    for activation in reference.ACTIVATIONS:
        yield "gated_activation", [x(8, 2 * INTERMEDIATE), activation]
        yield "activation", [x(8, INTERMEDIATE), activation]
    yield "clamped_swiglu", [x(8, 2 * INTERMEDIATE), 1.7, 7.0]
    yield "soft_cap", [x(8, V), 30.0]
    yield "scaled_sum", [x(8, D), x(8, D), floats(1)]
    for gates in (D, 1):
        yield "sigmoid_gated", [x(8, D), x(8, gates)]
    yield "log_sum_exp", [x(8, V)]
    yield "qk_norm", [x(8, 7168), empty(5120, dtype=norm_dtype), empty(1024, dtype=norm_dtype), 1e-6]
    norm = empty(2816, dtype=norm_dtype)
    yield "sum_of_norms", [x(8, 2816), norm, x(8, 2816), norm, floats(1), norm, 1e-6]
    yield "keep_rows", [x(8, D), integers(8), x(8, D)]


@pytest.mark.parametrize(
    ("capability", "dtype", "norm_dtype", "once"),
    [
        ((9, 0), torch.bfloat16, torch.bfloat16, True),
        pytest.param((9, 0), torch.bfloat16, torch.bfloat16, False, marks=pytest.mark.battery),
        pytest.param((8, 0), torch.float16, torch.float32, False, marks=pytest.mark.battery),
        pytest.param((8, 0), torch.float32, torch.float32, False, marks=pytest.mark.battery),
    ],
    ids=str,
)
def test_compiles_without_spills(
    capability: tuple[int, int], dtype: torch.dtype, norm_dtype: torch.dtype, once: bool
) -> None:
    cases = list(compiled_cases(dtype, norm_dtype))
    for name, given in [*dict(cases).items()][::12] if once else cases:  # once: a case of each twelfth op
        binary, registers = ahead_of_time.without_spills(launch_of(name, given), capability)
        print(f"{name}: {registers} registers, {binary.metadata.shared} bytes of shared memory")
        assert ".fma" not in binary.asm["ptx"], f"{name}: fused, it rounds once where the reference rounds twice"


# ---- refused --------------------------------------------------------------------------------------------------------

REFUSED_HERE: list[tuple[Callable, str]] = [
    (lambda op: op.rms_norm(ONES, torch.ones(8).half(), 1e-6), r"float32 on cpu, got \[8\] of torch.float16"),
    (lambda op: op.rms_norm(torch.ones(8), torch.ones(8), 1e-6), r"x must be \[rows, size\]"),
    (lambda op: op.gated_activation(ONES, "relu"), "must be silu or gelu_tanh or gelu or relu2, got relu"),
    (lambda op: op.activation(ONES, "relu"), "activation: activation must be silu or gelu_tanh or gelu or relu2, got"),
    (lambda op: op.gated_rms_norm(ONES, ONES, ONES[0].half(), 1e-6, 4, True), "weight must be of torch.float32"),
    (lambda op: op.sigmoid_gated(ONES, ONES[:1]), r"gate must be .* of torch.float32 on cpu, got \[1"),
    (lambda op: op.sigmoid_gated(ONES, ONES.half()), "of torch.float16"),
    (lambda op: op.log_sum_exp(torch.ones(2, 0)), "must have columns"),
    (lambda op: op.qk_norm(ONES, ONES[0, :5], ONES[0, :3], 1e-6), r"2 \* len\(k_norm\) columns, 11, got 8"),
    (lambda op: op.qk_norm(ONES, ONES[0, :4], ONES[0, :2].half(), 1e-6), r"a weight must be a contiguous \[2\]"),
    (lambda op: op.sum_of_norms(ONES, None, ONES[:1], None, None, None, 1e-6), r"y must be \[2, 8\]"),
    (lambda op: op.sum_of_norms(ONES, None, ONES, ONES[0].half(), None, None, 1e-6), r"y_norm must be a .*\[8\]"),
    (lambda op: op.sum_of_norms(ONES, None, ONES, None, ONES[0], None, 1e-6), r"scale must be a contiguous \[1\]"),
    (lambda op: op.keep_rows(ONES, torch.tensor([0]), ONES[:1]), r"kept a contiguous \[2, 8\] .* got \[1, 8\]"),
    (lambda op: op.keep_rows(ONES, torch.tensor([0]), ONES.half()), "got .* of torch.float16"),
    (lambda op: op.keep_rows(ONES, torch.tensor([0.0]), ONES), r"indices must be a contiguous \[R\] of int32 or int64"),
    (lambda op: op.table_rows(ONES.t(), torch.tensor([0])), r"table must be a contiguous \[L, D\]"),
    (lambda op: op.table_rows(ONES, torch.tensor([0.0])), "table_rows: indices must be"),
]


@pytest.mark.parametrize(("call", "message"), [*REFUSED, *REFUSED_HERE])
def test_refuses_by_name(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(triton_rowwise)


# Each function of each case once, with the dtypes in turn; the others: battery.
ORDINARY = [name for at, name in enumerate(INTERPRETED) if (at // 9 + at) % 3 == at // 3 % 3][::2]
test_interpreted = interpreted.each_of(INTERPRETED, {*ORDINARY, "extremes", "keep rows", "sums of norms by bits"})
