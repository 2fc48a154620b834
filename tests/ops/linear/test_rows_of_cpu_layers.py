"""What linear layers of a CPU promise of a row: its bits in any batch, from any place, with any number of threads."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import isas_of
from compiled_llm.ops.linear.packed_linear import pack_weight
from compiled_llm.ops.linear.quantized_weight import WeightFormat
from tests.ops.instruction_sets import by_set, skip_without
from tests.ops.linear import test_packed_linear as packed
from tests.ops.linear import test_quantized_linear as quantised
from tests.ops.linear import test_quantized_linear_a8 as a8

BFLOAT16, DTYPES = torch.bfloat16, packed.DTYPES


class Layer(NamedTuple):
    """On one instruction set."""

    isa: str
    op: str
    dtype: torch.dtype
    form: WeightFormat | None = None

    @property
    def kernels(self) -> native.Kernels:
        return skip_without(native.load("linear_cpu" if self.form is None else f"{self.op}_cpu"), self.isa)

    def arguments(self, rows: int, n: int, k: int) -> tuple:
        """Of its op: inputs ``[rows, k]``, the weights of ``n`` outputs, a bias and the like."""
        if self.form is None:
            x, weight, bias = packed.problem(rows, n, k, self.dtype)
            return x, pack_weight(weight), bias, n
        if self.op == "quantized_linear_a8":
            return a8.problem(self.form, rows, n, k, self.dtype).args()
        of = quantised.problem(rows, n, k, self.form, self.dtype)
        return of.args(of.x, of.bias)

    def made(self, rows: int, n: int, k: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Inputs, and the layer as a function of such."""
        (x, *others), kernels = self.arguments(rows, n, k), self.kernels
        return x, lambda x: kernels.run(self.op, x, *others, isa=self.isa)


A8_SETS = isas_of("quantized_linear_a8_cpu")
LAYERS = [
    *by_set("linear_cpu", [(isa, "packed_linear", dtype) for isa, dtype in packed.KERNELS]),
    *by_set("quantized_linear_cpu", [
        (isa, "quantized_linear", dtype, quantised.FORMATS[3]) for isa, dtype in quantised.SAMPLE
    ]),
    *by_set("quantized_linear_a8_cpu", [(isa, "quantized_linear_a8", BFLOAT16, a8.FORMATS[5]) for isa in A8_SETS]),
]  # fmt: skip
MORE = [  # a battery
    *((isa, "quantized_linear", dtype, form)
      for form in quantised.FORMATS for isa in isas_of("quantized_linear_cpu") for dtype in DTYPES),
    *((isa, "quantized_linear_a8", BFLOAT16, form) for form in a8.FORMATS for isa in A8_SETS),
]  # fmt: skip


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    """AMX also as a model of it in software, for CPUs without: a test below compares its bits to those of a CPU's."""
    made = Layer(*request.param)
    if made.isa == "amx_in_software" and "amx" in made.kernels.supported_isas():
        pytest.skip("the same bits as the CPU's own AMX")
    return made


def check_any_batch(layer: Layer, n: int, k: int, numbers: Iterable[int]) -> None:
    x, run = layer.made(max(numbers), n, k)
    torch.set_num_threads(1)
    alone = torch.cat([run(row) for row in x.split(1)])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in numbers:
            assert torch.equal(run(x[:rows]), alone[:rows])
            assert torch.equal(run(x[-rows:]), alone[-rows:])


def test_a_row_has_the_same_bits_in_any_batch(layer: Layer) -> None:
    check_any_batch(layer, 48, 65, (1, 2, 3, 4, 5, 8, 9, 17, 33, 70, 130))


def test_a_row_of_fp8_has_the_same_bits_where_codes_are_decoded_once() -> None:
    layer = Layer(quantised.BEST, "quantized_linear", BFLOAT16, WeightFormat("fp8", 32))
    check_any_batch(layer, 48, 68, (1, 24, 25, 70, 300))


@pytest.mark.battery
@pytest.mark.parametrize("case", [*packed.KERNELS, *MORE], ids=str)
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(case: tuple) -> None:
    layer = Layer(*case) if len(case) > 2 else Layer(case[0], "packed_linear", case[1])
    check_any_batch(layer, 100, 708, [*range(1, 131), 300, 513])


@pytest.mark.parametrize(("rows", "n", "k"), [(33, 1000, 512), (300, 48, 5000)])
def test_threads_share_large_work(layer: Layer, rows: int, n: int, k: int) -> None:
    """Many columns, and several blocks of rows."""
    x, run = layer.made(rows, n, k)
    torch.set_num_threads(1)
    expected = torch.cat([run(part) for part in x.split(60)])
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(run(x), expected)


@pytest.mark.parametrize("k", [64, 65])
def test_strided_rows_and_no_rows(layer: Layer, k: int) -> None:
    wide, (_, run) = torch.randn(20, 150).to(layer.dtype), layer.made(1, 33, k)
    for x in (wide[:, 3 : 3 + k], wide[::2, 7 : 7 + k], wide[4:5, 1 : 1 + k], wide[:1, :k].expand(9, k), wide[:0, :k]):
        assert torch.equal(run(x), run(x.contiguous()))


def test_a_row_that_is_not_finite_leaves_the_others_alone(layer: Layer) -> None:
    clean, run = layer.made(9, 20, 64)
    x, others = clean.clone(), [0, 1, 2, 4, 6, 7, 8]
    x[3, 32], x[5, 0] = float("inf"), float("nan")
    actual = run(x)
    assert torch.equal(actual[others], run(clean)[others])
    assert not actual[3].isfinite().any()
    assert actual[5].isnan().all()


@pytest.mark.battery
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 256), (33, 100, 700), (300, 96, 1024)])
@pytest.mark.parametrize("form", [None, *quantised.FORMATS], ids=str)
def test_software_tiles_are_those_of_the_cpu(form: WeightFormat | None, rows: int, n: int, k: int) -> None:
    """Bit for bit, so what holds for the one holds for the other."""
    layer = Layer("amx", "packed_linear" if form is None else "quantized_linear", BFLOAT16, form)
    given, kernels = layer.arguments(rows, n, k), layer.kernels
    of_the_cpu, in_software = (kernels.run(layer.op, *given, isa=isa) for isa in ("amx", "amx_in_software"))
    assert torch.equal(of_the_cpu, in_software)
