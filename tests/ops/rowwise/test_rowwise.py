"""Row-wise ops against their references, and: a row's bits depend on nothing but the row."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from compiled_llm.ops import native
from compiled_llm.ops.rowwise import reference, rowwise
from tests.ops.instruction_sets import by_set, skip_without
from tests.ops.rowwise.rowwise_cases import (
    CASES,
    DTYPES,
    GPU_CASES,
    REFUSED,
    check,
    cut,
    extremes,
    numbers,
    outputs,
    weight,
    widened,
)

OP = "rowwise_cpu"
ISAS = by_set(OP)
PARAMS = [pytest.param(*case, id=name) for name, case in CASES.items()]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_every_instruction_set_computes_what_the_reference_does(
    name: str, arguments: Callable, dtype: torch.dtype, isa: str
) -> None:
    kernels = skip_without(native.load(OP), isa)
    for size in (2, 24, 64, 1030):
        given = arguments(dtype, 5, size)
        got = outputs(kernels.run(name, *given, isa=isa))
        want = getattr(reference, f"{name}_reference")(*(map(widened, given) if dtype == torch.float32 else given))
        check(got, outputs(want), dtype, is_gelu="gelu" in given or "gelu_tanh" in given)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    name: str, arguments: Callable, dtype: torch.dtype, isa: str
) -> None:
    kernels, rows, size = skip_without(native.load(OP), isa), 67, 200
    given = arguments(dtype, rows, size)
    whole = outputs(kernels.run(name, *given, isa=isa))

    for part in (slice(0, 1), slice(3, 4), slice(66, 67), slice(0, 8), slice(5, 38)):
        alone = outputs(kernels.run(name, *[cut(x, part) for x in given], isa=isa))
        for some, every in zip(alone, whole, strict=True):
            assert torch.equal(some, every[part])


@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_threads_change_no_bit(name: str, arguments: Callable) -> None:
    given = arguments(torch.bfloat16, 300, 400)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(outputs(getattr(rowwise, name)(*given)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), (CASES | GPU_CASES).values(), ids=CASES | GPU_CASES)
def test_ops_are_registered_as_torch_expects(name: str, arguments: Callable, dtype: torch.dtype) -> None:
    op = getattr(torch.ops.compiled_llm, name)
    torch.library.opcheck(op, arguments(dtype, 3, 32), test_utils=("test_schema", "test_faketensor"))


def test_a_cpu_has_an_op_for_each_part_of_what_a_gpu_has_at_once() -> None:
    x, y, norm = numbers(3, 64, torch.float32), numbers(3, 64, torch.float32, 3.0).flip(1), weight(64, torch.float32)
    norms = norm[:32], norm[32:48]
    torch.testing.assert_close(rowwise.qk_norm(x, *norms, 1e-5), reference.qk_norm_reference(x, *norms, 1e-5))
    for x_norm, y_norm, scale in ((norm, norm, None), (None, norm, torch.tensor([0.37])), (None, None, None)):
        total, out = reference.sum_of_norms_reference(x, x_norm, y, y_norm, scale, norm, 1e-5)
        torch.testing.assert_close(rowwise.sum_of_norms(x, x_norm, y, y_norm, 1e-5, scale), total)
        if x_norm is None:
            torch.testing.assert_close(rowwise.norm_of_sum(x, y, y_norm, norm, 1e-5, scale), (total, out))
    kept, indices = torch.zeros(4, 64), torch.tensor([2, 0, 2])
    assert torch.equal(rowwise.keep_rows(x, indices, kept), x[indices])
    assert torch.equal(kept, torch.cat([x, torch.zeros(1, 64)]))
    torch.library.opcheck(torch.ops.compiled_llm.keep_rows, (x, indices, kept), test_utils=("test_schema",))
    assert torch.equal(rowwise.table_rows(x, indices), x[indices])
    torch.library.opcheck(
        torch.ops.compiled_llm.table_rows, (x, indices), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_to_their_slots_of_a_cache(dtype: torch.dtype) -> None:
    """Several hundred, which threads share, from a column on; nothing else of the cache is touched."""
    x, slots = numbers(600, 96, dtype)[:, 16:80], (7 * torch.arange(600, dtype=torch.int32)) % 640
    written, expected = numbers(160, 400, dtype).view(160, 4, 100), numbers(160, 400, dtype).view(160, 4, 100)
    rowwise.write_slots(written, slots, x, 24)
    expected.view(640, 100)[slots.long(), 24:88] = x
    assert torch.equal(written, expected)
    reference.write_slots_reference(expected, slots.flip(0), x, 0)
    rowwise.write_slots(written, slots.flip(0), x)
    assert torch.equal(written, expected)
    op = torch.ops.compiled_llm.write_slots
    torch.library.opcheck(op, (written, slots, x, 24), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("count", [31, 32, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_lines_and_parts_of_them_go_to_slots(count: int, dtype: torch.dtype) -> None:
    """From 32 rows on whole lines do not go through the caches."""
    line = 64 // dtype.itemsize
    for size, column, width in [(2 * line, 0, 6 * line), (2 * line, 4 * line, 6 * line), (line, line + 1, 6 * line),
                                (line + 1, line, 6 * line), (line, line, 6 * line + 1), (0, 0, line)]:  # fmt: skip
        x, slots = numbers(count, size + 1, dtype)[:, 1:], (7 * torch.arange(count, dtype=torch.int32)) % 640
        written = numbers(640, width, dtype).view(40, 16, width)
        expected = written.clone()
        rowwise.write_slots(written, slots, x, column)
        reference.write_slots_reference(expected, slots, x, column)
        assert torch.equal(written, expected), (size, column, width)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda c, s, x: (c, s + 1, x, 0), IndexError, r"slots\[2\] is 12, and the cache has 12"),
        (lambda c, s, x: (c, s - 1, x, 0), IndexError, r"slots\[1\] is -1"),
        (lambda c, s, x: (c, s, x, 3), ValueError, r"\[blocks, slots, 11\] or wider .* column 3"),
        (lambda c, s, x: (c, s, x, -1), ValueError, "column -1"),
        (lambda c, s, x: (c, s, x.half(), 0), ValueError, "of float16 on the CPU, got .* of float32"),
        (lambda c, s, x: (c.mT.contiguous().mT, s, x, 0), ValueError, "cache must be a contiguous"),
        (lambda c, s, x: (c, s.long(), x, 0), ValueError, r"slots must be a contiguous \[3\] of int32"),
        (lambda c, s, x: (c, s[:2], x, 0), ValueError, r"slots must be a contiguous \[3\]"),
    ],
)
def test_slots_that_there_are_not_are_refused(change: Callable, error: type[Exception], said: str) -> None:
    cache, slots, x = torch.zeros(3, 4, 10), torch.tensor([5, 0, 11], dtype=torch.int32), torch.ones(3, 8)
    with pytest.raises(error, match=said):
        torch.ops.compiled_llm.write_slots(*change(cache, slots, x))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_some_rows_of_many(dtype: torch.dtype) -> None:
    """Several hundred, which threads share, in any order and more than once; rows of x are strided."""
    x, indices = numbers(300, 96, dtype)[:, 16:80], (7 * torch.arange(600, dtype=torch.int32)) % 300
    assert torch.equal(rowwise.rows_at(x, indices), x[indices.long()])
    assert torch.equal(reference.rows_at_reference(x, indices), x[indices.long()])
    assert rowwise.rows_at(x, indices[:0]).shape == (0, 64)
    op = torch.ops.compiled_llm.rows_at
    torch.library.opcheck(op, (x, indices), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("indices", "error", "said"),
    [
        (torch.tensor([0, 3], dtype=torch.int32), IndexError, r"indices\[1\] is 3, and x has 3"),
        (torch.tensor([-1], dtype=torch.int32), IndexError, r"indices\[0\] is -1"),
        (torch.tensor([0]), ValueError, r"indices must be a contiguous \[rows\] of int32 on the CPU, got .* of int64"),
        (torch.zeros(1, 1, dtype=torch.int32), ValueError, "indices must be a contiguous"),
    ],
)
def test_rows_that_there_are_not_are_refused(indices: torch.Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        torch.ops.compiled_llm.rows_at(torch.ones(3, 8), indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_rounded_as_in_transformers(dtype: torch.dtype) -> None:
    x, own = numbers(5, 48, dtype, 3.0), numbers(1, 48, dtype)[0]
    for theirs, ours in ((LlamaRMSNorm(48, eps=1e-5), own), (Gemma2RMSNorm(48, eps=1e-5), 1 + own.float())):
        theirs.weight.data = own
        got = rowwise.rms_norm(x, ours, 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got, theirs(x), atol=0, rtol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norms_are_rounded_as_in_transformers(dtype: torch.dtype) -> None:
    x, gate, own = numbers(5, 96, dtype, 3.0), numbers(5, 96, dtype).flip(0), weight(96, dtype)
    of_heads, of_groups = Qwen3NextRMSNormGated(24, eps=1e-5), GraniteMoeHybridRMSNormGated(96, 48, eps=1e-5)
    of_heads.weight.data, of_groups.weight.data = own[:24], own
    for theirs, group, first in ((of_heads, 24, True), (of_groups, 48, False)):
        got = rowwise.gated_rms_norm(x, gate, theirs.weight.data, 1e-5, group, norm_first=first)
        parts = [t.unflatten(1, (-1, 24)) if first else t for t in (x, gate)]
        check((got,), (theirs(*parts).view(5, 96),), dtype, is_gelu=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_rounded_as_in_torch(dtype: torch.dtype) -> None:
    x, (w, b) = numbers(5, 48, dtype, 3.0), numbers(2, 48, dtype)
    got = rowwise.layer_norm(x, w, b, 1e-5)
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(
        got, torch.nn.functional.layer_norm(x, (48,), w, b, 1e-5), atol=tolerance, rtol=tolerance
    )


def test_extremes(kernels: native.Kernels) -> None:
    extremes(torch.ops.compiled_llm)


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refuses_by_name(kernels: native.Kernels, call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ops.compiled_llm)
