"""The packed linear: every instruction set of this machine against float64, batch invariance, the op's registration."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import isas_of
from compiled_llm.ops.linear import packed_linear as linear
from tests.ops.instruction_sets import by_set, ordinary_sets, skip_without

OP = "linear_cpu"
ROWS = [0, 1, 2, 3, 5, 8, 16, 31, 33, 100, 513]
# (out_features, in_features): one of each, less than a tile of K, whole tiles, cut tiles, odd K, several chunks of K
SHAPES = [(1, 1), (96, 20), (48, 64), (50, 65), (17, 513), (100, 700), (208, 256)]
BFLOAT16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
DTYPES = [BFLOAT16, FLOAT32, FLOAT16]
SETS = dict.fromkeys([*ordinary_sets(OP), "avx512", "avx2"])  # others multiply bfloat16 alone otherwise
KERNELS = [(isa, BFLOAT16) for isa in isas_of(OP)]
KERNELS += [(isa, dtype) for dtype in (FLOAT32, FLOAT16) for isa in SETS]


class Runner(NamedTuple):
    """``packed_linear`` on one instruction set, and problems in one dtype."""

    isa: str
    dtype: torch.dtype

    def __call__(self, x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
        return native.load(OP).run("packed_linear", x, packed, bias, n, isa=self.isa)

    def problem(self, rows: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        return problem(rows, n, k, self.dtype)


@pytest.fixture(params=by_set(OP, KERNELS))
def run(request: pytest.FixtureRequest, kernels: native.Kernels) -> Runner:
    """Each kernel there is; AMX also as a model of it in software, for CPUs without."""
    isa, dtype = request.param
    skip_without(kernels, isa)
    if isa == "amx_in_software" and "amx" in kernels.supported_isas():
        pytest.skip("the same bits as the CPU's own AMX, see test_rows_of_cpu_layers.py")
    return Runner(isa, dtype)


def problem(rows: int, n: int, k: int, dtype: torch.dtype = BFLOAT16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


def assert_rounded_once(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Half a step of the dtype from the exact result, and float32's error in the sum."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T
    error = (actual.double() - exact).abs()
    assert actual.dtype == x.dtype
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert (error <= exact.abs() * torch.finfo(x.dtype).eps / 2 + magnitude * 2**-20 + 1e-30).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_float(run: Runner, n: int, k: int, with_bias: bool) -> None:
    for rows in ROWS:
        x, weight, bias = run.problem(rows, n, k)
        offset = bias if with_bias else None
        assert_rounded_once(run(x, linear.pack_weight(weight), offset, n), x, weight, offset)


def test_few_rows_of_weights_that_come_from_memory(run: Runner) -> None:
    """More than 1 MiB are read as one stream by up to four rows, and ahead by 24 and more: with the same bits."""
    n, k = 1040, 530
    x, weight, bias = run.problem(25, n, k)
    packed = linear.pack_weight(weight)
    assert packed.nbytes > 2**20
    whole = run(x, packed, bias, n)
    assert_rounded_once(whole, x, weight, bias)
    for rows in (1, 2, 4, 5):
        assert torch.equal(run(x[:rows].contiguous(), packed, bias, n), whole[:rows]), rows


def test_infinity_and_overflow_arrive(run: Runner) -> None:
    x, weight, _ = run.problem(9, 20, 33)
    packed = linear.pack_weight(weight)
    x[3, 32], x[7, 1] = float("inf"), torch.finfo(run.dtype).max * 0.9
    actual = run(x, packed, None, 20)
    assert actual[3].isinf().all()
    assert torch.equal(actual[7].isinf(), linear.packed_linear_reference(x, packed, None, 20)[7].isinf())


@pytest.mark.battery
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_sets_with_products_of_bfloat16_multiply_others_as_avx512(kernels: native.Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = problem(33, 100, 700, dtype)
    args = (x, linear.pack_weight(weight), bias, 100)
    sets = [isa for isa in kernels.supported_isas() if isa.startswith("a") and isa != "avx2"]
    for isa in sets:
        assert torch.equal(
            kernels.run("packed_linear", *args, isa=isa), kernels.run("packed_linear", *args, isa="avx512")
        )


def test_pack_weight_layout() -> None:
    weight = torch.arange(18 * 5).view(18, 5).bfloat16()
    packed = linear.pack_weight(weight)
    assert packed.shape == (2, 3, 16, 2)
    assert packed.is_contiguous()
    for n, k in ((0, 0), (15, 1), (16, 2), (17, 4)):
        assert packed[n // 16, k // 2, n % 16, k % 2] == weight[n, k]
    assert (packed[:, 2, :, 1] == 0).all()
    assert (packed[1, :, 2:] == 0).all()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_pack_weight_layout_by_single_inputs(dtype: torch.dtype) -> None:
    weight = torch.arange(18 * 5).view(18, 5).to(dtype)
    packed = linear.pack_weight(weight)
    assert packed.shape == (2, 5, 16, 1)
    assert packed.is_contiguous()
    assert torch.equal(packed.transpose(1, 2).reshape(32, 5), F.pad(weight, (0, 0, 0, 14)))


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("in_features", [1, 33, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_packed_wherever_a_piece_begins(
    dtype: torch.dtype, in_features: int, has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(53, in_features).to(dtype)
    expected = linear.pack_weight(weight)
    if not has_compiler:
        monkeypatch.setattr(linear, "_packing", dict)
    packed = linear.empty_packed(53, in_features, dtype, torch.device("cpu"))
    for start, end in ((20, 53), (0, 3), (3, 20)):
        linear.pack_rows(packed, start, weight[start:end])
    assert torch.equal(packed, expected)
    assert torch.equal(packed.transpose(1, 2).reshape(64, -1)[:53, :in_features], weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_weight_in_huge_pages(dtype: torch.dtype) -> None:
    weight = torch.randn(1000, 2050).to(dtype)
    packed = linear.pack_weight(weight)
    assert packed.is_contiguous()
    unpacked = packed.transpose(1, 2).reshape(-1, 2050)
    assert torch.equal(unpacked[:1000], weight)
    assert (unpacked[1000:] == 0).all()


@pytest.mark.parametrize(("rows", "with_bias", "dtype"), [(1, False, BFLOAT16), (5, True, FLOAT32), (5, True, FLOAT16)])
def test_op(rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = problem(rows, 50, 65, dtype)
    args = (x, linear.pack_weight(weight), bias if with_bias else None, 50)
    torch.library.opcheck(torch.ops.compiled_llm.packed_linear.default, args)
    assert_rounded_once(linear.packed_linear(*args), x, weight, args[2])


def test_fullgraph_compile() -> None:
    x, weight, bias = problem(5, 50, 64)
    packed = linear.pack_weight(weight)
    compiled = torch.compile(lambda x: linear.packed_linear(x, packed, bias, 50) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), linear.packed_linear(x, packed, bias, 50) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_unpack_rows(index: torch.dtype, dtype: torch.dtype) -> None:
    weight, rows = torch.randn(50, 64).to(dtype), torch.tensor([49, 0, 17, 17, 32])
    assert torch.equal(linear.unpack_rows(linear.pack_weight(weight), rows.to(index)), weight[rows])


def test_refuses_wrong_inputs(kernels: native.Kernels) -> None:
    x, weight, bias = problem(4, 50, 64)
    packed = linear.pack_weight(weight)
    wrong = [
        ((x, packed.float(), bias, 50), "take a contiguous packed"),
        ((x, packed, bias.float(), 50), "bias must be"),
        ((x.double(), packed.double(), bias.double(), 50), "x must be bfloat16, float32 or float16"),
        ((x.float(), packed.float(), bias.float(), 50), "take a contiguous packed"),
        ((x[0], packed, bias, 50), r"x must be \[T, K\]"),
        ((x[:, :0], packed, bias, 50), r"x must be \[T, K\]"),
        ((x.T.contiguous().T, packed, bias, 50), "last stride of x must be 1"),
        ((x[:, :62], packed, bias, 50), "take a contiguous packed"),
        ((x, packed, bias, 65), "take a contiguous packed"),
        ((x, weight, bias, 50), "take a contiguous packed"),
        ((x, packed, bias, 0), "take a contiguous packed"),
        ((x, packed.transpose(0, 1).contiguous().transpose(0, 1), bias, 50), "take a contiguous packed"),
        ((x, packed, bias[:49], 50), "bias must be"),
    ]
    for args, message in wrong:
        with pytest.raises(ValueError, match=message):
            kernels.run("packed_linear", *args)
    with pytest.raises(ValueError, match="isa 'mmx' is unknown"):
        kernels.run("packed_linear", x, packed, bias, 50, isa="mmx")
