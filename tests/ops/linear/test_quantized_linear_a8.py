"""Linear layers of quantised weights and activations: the reference by its definition, every
instruction set equal to it to the bit, rows alone and in any batch, registration."""

import itertools
from typing import NamedTuple

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from compiled_llm import ops
from compiled_llm.ops import native
from compiled_llm.ops.linear import quantized_linear_a8 as a8
from compiled_llm.ops.linear import quantized_weight as weights
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, QuantizedWeight, WeightFormat
from tests.ops.instruction_sets import by_set, skip_without

FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int8", zeros=True, scale_dtype="bfloat16"),
    WeightFormat("int8", 32, scale_dtype="float16"),
    WeightFormat("int4"),
    WeightFormat("int4", 32, scale_dtype="bfloat16"),
    WeightFormat("int4", 32, zeros=True, scale_dtype="float16"),
    WeightFormat("int4", 64, zeros=True),
    WeightFormat("int4", 128, zeros=True, scale_dtype="bfloat16", zero_dtype="float32"),
    WeightFormat("int4", 128, scale_dtype="float16"),
]
ISAS = by_set("quantized_linear_a8_cpu")
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


class Problem(NamedTuple):
    x: Tensor
    rows: QuantizedRows
    weight: QuantizedWeight
    bias: Tensor
    form: WeightFormat

    def args(
        self, x: Tensor | None = None, *, with_bias: bool = True, x_scale: Tensor | None = None, by_groups: bool = False
    ) -> tuple:
        bias = self.bias if with_bias else None
        return (
            (self.x if x is None else x), *self.weight, bias, x_scale, by_groups,
            self.form.element, self.form.group_size, len(self.rows.codes),
        )  # fmt: skip


def packed(rows: QuantizedRows, form: WeightFormat) -> QuantizedWeight:
    weight = weights.empty_quantized(form, *rows.codes.shape, torch.device("cpu"))
    weights.pack_quantized_rows(weight, 0, rows, form)
    return weight


def problem(form: WeightFormat, t: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    generator = torch.Generator().manual_seed(t + n + k)
    rows = weights.quantize(torch.randn(n, k, generator=generator) + 0.2, form)
    x, bias = torch.randn(t, k, generator=generator), torch.randn(n, generator=generator)
    return Problem(x.to(dtype), rows, packed(rows, form), bias.to(dtype), form)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_reference_is_the_product_of_what_the_codes_stand_for(form: WeightFormat) -> None:
    for dtype in DTYPES:
        case = problem(form, 9, 50, 331, dtype)
        xq, sx = a8.quantize_activations(case.x, None)
        exact = (xq.double() * sx[:, None]) @ weights.dequantize(case.rows, form).double().T + case.bias.double()
        actual = a8.quantized_linear_a8_reference(*case.args())
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-4)


def test_activations_are_quantised_a_row_at_a_time() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0, 0, 0, 0, 0], [0, 1e-45, 0, 0, 0], [1, torch.nan, 0, 0, 0]])
    codes, scales = a8.quantize_activations(x, None)
    assert codes.tolist() == [[127, 0, 2, -2, -127], [0] * 5, [0] * 5, [0] * 5]
    assert scales[:3].tolist() == [1, 0, 0]
    assert scales[3].isnan()
    codes, scales = a8.quantize_activations(torch.tensor([[300.0, -5, 1.25], [-torch.inf, 0, 0]]), torch.tensor([0.5]))
    assert codes.tolist() == [[127, -10, 2], [0, 0, 0]]
    assert scales[0] == 0.5
    assert scales[1].isnan()


def test_static_codes_beside_those_of_compressed_tensors() -> None:
    """They differ in what is -128 there, and within the calibrated range ours are as near."""
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor", dynamic=False)
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    scale, zero = calculate_qparams(x.min(), x.max(), args)
    torch.testing.assert_close(scale, x.abs().max().view(1) / 127.5)
    x = torch.cat([x, 1.5 * x, torch.tensor([-127.4, -127.5, -127.6, -128.0, 127.5]).expand(64, 5) * scale], 1)
    theirs = quantize(x, scale, zero, args, dtype=torch.int8)
    ours, _ = a8.quantize_activations(x, scale.view(1))
    assert (theirs == -128).any()
    assert torch.equal(ours, theirs.clamp(min=-127))
    inside = x.abs() <= 127.5 * scale
    assert inside[:, :200].all()
    assert ((x - ours * scale).abs()[inside] <= 0.50001 * scale).all()
    # What is lost beyond: a step at most.
    assert ((ours.int() - theirs.int()).abs() <= 1).all()


def by_groups(case: Problem) -> list[tuple]:
    """Arguments where each group of a row has a scale of its own, with large inputs and a group of zeros; or none."""
    if not case.form.group_size:
        return []
    x = case.x.clone()
    x[:, ::37] *= 100
    x[1:2, : case.form.group_size] = 0
    return [case.args(x, by_groups=True), case.args(x, with_bias=False, by_groups=True)]


def test_a_group_s_scale_is_its_own() -> None:
    """An input that is 100 times as large costs the others of its group their precision, and no others."""
    form = WeightFormat("int8", 32, scale_dtype="bfloat16")
    case = problem(form, 16, 40, 256, torch.float32)
    case.x[:, 5] *= 100
    exact = case.x.double() @ weights.dequantize(case.rows, form).double().T + case.bias.double()

    def error(args: tuple) -> float:
        return float((ops.quantized_linear_a8(*args) - exact).norm())

    assert error(case.args(by_groups=True)) < 0.5 * error(case.args())
    codes, scales = a8.quantize_activations_by_groups(case.x, 32)
    off = (codes.view(16, 8, 32) * scales[:, :, None] - case.x.view(16, 8, 32)).abs().amax((0, 2))
    assert (off[1:] < 0.02).all()


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def experts(form: WeightFormat, count: int, n: int, k: int) -> tuple[list[Problem], QuantizedWeight, Tensor]:
    """A problem each, their weights together, and their biases."""
    cases = [problem(form, 30, n, k) for e in range(count)]
    cases = [case._replace(bias=case.bias + e) for e, case in enumerate(cases)]
    for e, case in enumerate(cases):
        case.weight.scales.mul_(e + 1)
    parts = list(zip(*(case.weight for case in cases), strict=True))
    together = QuantizedWeight(
        torch.stack(parts[0]), torch.stack(parts[1]), torch.stack(parts[2]) if form.zeros else None
    )
    return cases, together, torch.stack([case.bias for case in cases])


@pytest.mark.parametrize("form", FORMATS[1::3], ids=str)
def test_ops(form: WeightFormat) -> None:
    case = problem(form, 5, 50, 65)
    for args in (case.args(), case.args(with_bias=False, x_scale=torch.tensor([0.01])), *by_groups(case)):
        torch.library.opcheck(torch.ops.compiled_llm.quantized_linear_a8.default, args)
        assert torch.equal(ops.quantized_linear_a8(*args), a8.quantized_linear_a8_reference(*args))


@pytest.mark.parametrize("form", FORMATS[:1] + FORMATS[5:6], ids=str)
def test_grouped_ops(form: WeightFormat) -> None:
    cases, weight, bias = experts(form, 4, 50, 65)
    rows, starts = torch.arange(29, -1, -1, dtype=torch.int32), starts_of([3, 0, 20, 5])
    args = (cases[0].x, *weight, bias, None, rows, starts, False, form.element, form.group_size, 50)
    torch.library.opcheck(torch.ops.compiled_llm.grouped_quantized_linear_a8.default, (*args[:6], rows[:28], *args[7:]))
    out = ops.grouped_quantized_linear_a8(*args)
    for e, case in enumerate(cases):
        own = slice(starts[e], starts[e + 1])
        alone = ops.quantized_linear_a8(*case.args(cases[0].x[rows[own]]))
        assert torch.equal(out[own], alone)


def run(isa: str, args: tuple, op: str = "quantized_linear_a8") -> Tensor:
    return skip_without(native.load("quantized_linear_a8_cpu"), isa).run(op, *args, isa=isa)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_gives_the_bits_of_the_reference(isa: str, form: WeightFormat) -> None:
    torch.set_num_threads(1)
    for dtype, (t, n, k) in itertools.product(DTYPES, [(0, 20, 40), (1, 1, 1), (3, 50, 331), (17, 40, 140)]):
        case = problem(form, t, n, k, dtype)
        for args in (case.args(), case.args(with_bias=False, x_scale=torch.tensor([0.02])), *by_groups(case)):
            assert torch.equal(run(isa, args), a8.quantized_linear_a8_reference(*args))


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.id != "portable"])
@pytest.mark.parametrize(
    "form", [*FORMATS, *(WeightFormat(e, g) for e in ("int8", "int4") for g in (40, 96, 2048))], ids=str
)
def test_blocks_of_rows_have_the_bits_of_the_reference(isa: str, form: WeightFormat) -> None:
    torch.set_num_threads(1)
    for t, n, k in [(8, 16, 24), (15, 33, 331), (16, 32, 64), (35, 50, 2177), (70, 17, 1024)]:
        case = problem(form, t, n, k)
        for args in (case.args(), *by_groups(case)):
            assert torch.equal(run(isa, args), a8.quantized_linear_a8_reference(*args)), (t, n, k)


@pytest.mark.parametrize("element", ["int8", "int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_sums_of_the_largest_codes(isa: str, element: str) -> None:
    least, most = (-128, 127) if element == "int8" else (-8, 7)
    form = WeightFormat(element)
    for code, k in itertools.product((least, most), (17, 9000)):
        rows = QuantizedRows(torch.full((20, k), code, dtype=torch.int8), torch.ones(20, 1))
        x = torch.ones(9, k)
        x[1] = -1
        case = Problem(x, rows, packed(rows, form), torch.zeros(20), form)
        assert torch.equal(run(isa, case.args()), a8.quantized_linear_a8_reference(*case.args()))


@pytest.mark.parametrize("x_scale", [None, torch.tensor([0.02])])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_are_not_finite(isa: str, x_scale: Tensor | None) -> None:
    case = problem(FORMATS[4], 9, 20, 33)
    clean = run(isa, case.args(x_scale=x_scale))
    x = case.x.clone()
    x[3, 32], x[5, 0], x[7, 1] = float("inf"), float("nan"), float("-inf")
    if x_scale is None:
        assert run(isa, case.args(x, by_groups=True))[[3, 5, 7]].isnan().all()
    actual, others = run(isa, case.args(x, x_scale=x_scale)), [0, 1, 2, 4, 6, 8]
    assert actual[[3, 5, 7]].isnan().all()
    assert torch.equal(actual[others], clean[others])


@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[5]], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_experts_have_the_bits_of_single_layers(isa: str, form: WeightFormat) -> None:
    cases, weight, bias = experts(form, 6, 50, 65)
    x = torch.cat([cases[0].x, torch.full((1, 65), torch.nan).bfloat16()])  # which no row takes
    for counts in ([1, 0, 0, 0, 0, 1], [3, 0, 1, 17, 0, 40]):
        rows = torch.arange(sum(counts) + 3, dtype=torch.int32) * 7 % 30
        starts = starts_of(counts) + 2
        for threads in (1, 3):
            torch.set_num_threads(threads)
            args = (x, *weight, bias, None, rows, starts, False, form.element, form.group_size, 50)
            out = run(isa, args, "grouped_quantized_linear_a8")
            gathered = run(isa, (x[rows], *args[1:6], None, *args[7:]), "grouped_quantized_linear_a8")
            for e, case in enumerate(cases):
                own = slice(starts[e], starts[e + 1])
                expected = run(isa, case.args(x[rows[own]]))
                assert torch.equal(out[own], expected)
                assert torch.equal(gathered[own], expected)


def test_refuses_wrong_inputs() -> None:
    """What it refuses besides what ``quantized_linear`` does, by the same code."""
    case = problem(FORMATS[5], 4, 50, 64)
    names = ["x", "codes", "scales", "zeros", "bias", "x_scale", "by_groups", "element", "group_size", "out_features"]
    args = dict(zip(names, case.args(), strict=True))
    for changes, message in (
        ({"x": case.x[0]}, r"x must be \[T, K\]"),
        ({"element": "int8"}, "take contiguous codes"),
        ({"element": "fp8"}, "element must be int8 or int4"),
        ({"x_scale": torch.ones(2)}, "x_scale must be"),
        ({"x_scale": torch.ones(1), "by_groups": True}, "by_groups must be False with x_scale or without groups"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.quantized_linear_a8(*(args | changes).values())
    weight = [torch.stack([part, part]) for part in case.weight if part is not None]
    with pytest.raises(ValueError, match="starts must be"):
        ops.grouped_quantized_linear_a8(case.x, *weight, None, None, None, starts_of([2]), False, "int4", 32, 50)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_are_packed_wherever_a_piece_begins(form: WeightFormat) -> None:
    """By its definition, element by element."""
    case = problem(form, 1, 53, 70)
    weight = weights.empty_quantized(form, 53, 70, torch.device("cpu"))
    for start, end in ((20, 53), (0, 3), (3, 20)):
        own = QuantizedRows(*(None if part is None else part[start:end] for part in case.rows))
        weights.pack_quantized_rows(weight, start, own, form)
    assert torch.equal(weight.codes, case.weight.codes)
    for n, k in ((0, 0), (15, 5), (16, 69), (52, 66), (37, 12)):
        if form.element == "int8":
            code = weight.codes[n // 16, k // 4, n % 16, k % 4].view(torch.int8)
        else:
            code = (weight.codes[n // 16, k // 8, n % 16, k % 4] >> (k % 8 // 4 * 4) & 15).to(torch.int8) - 8
        assert code == case.rows.codes[n, k]
