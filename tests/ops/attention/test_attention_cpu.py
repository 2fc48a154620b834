"""The CPU's attention kernel to the bit: neighbours, chunks, shared prefixes and threads change nothing."""

import pytest
import torch

from compiled_llm.ops import native
from tests.ops.attention.attention_cases import CACHES, alone, check, grid, in_chunks, make_case, with_shared_prefixes
from tests.ops.attention.cpu_kernel import Attend, attend_on, every_set
from tests.ops.in_rows import InRows
from tests.ops.instruction_sets import skip_without

OP = "attention_cpu"
CASES = dict(grid())
MIXED = {"query_lens": [1, 40, 1], "context_lens": [700, 33, 0], "num_heads": 8, "padding_query_lens": [1, 2]}
# The dtypes of queries and cache, and a window, for what must not change a bit.
EXACT_OPTIONS: list[dict] = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "window": 100, "soft_cap": 5.0, "sinks": True},
    {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
    {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
    {"dtype": torch.float32, "kv_dtype": torch.int8, "window": 600},
]


EXACT = pytest.mark.parametrize("options", EXACT_OPTIONS, ids=lambda one: "-".join(map(str, one.values())))


@EXACT
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_neighbours_change_no_bit(attend: Attend, kind: str, options: dict) -> None:
    query_lens = [1] * 4 if kind == "decode" else [1, 70, 1, 9]
    context_lens = [1300, 5, 511, 60] if kind == "decode" else [1300, 513, 64, 0]
    case = make_case(query_lens, context_lens, num_heads=8, head_dim=128, trailing_rows=3, **options)
    together = attend(*case.args())
    for request in range(len(query_lens)):
        assert torch.equal(attend(*alone(case, request).args()), together[case.rows(request)])


@EXACT
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (4, 40)])
def test_blocks_that_lie_apart_change_no_bit(
    kernels: native.Kernels, options: dict, block_size: int, head_dim: int
) -> None:
    """A CPU's cache has those of other layers between them, which are left alone; all other tests have it so, too."""
    case = make_case(**MIXED, **options, block_size=block_size, head_dim=head_dim)
    found = []
    for in_rows in (False, True):
        values = case.values()
        found.append([attend_on(kernels, in_rows=in_rows)(*values.values()), *(values[name] for name in CACHES)])
    for apart, together in zip(*found, strict=True):
        assert (apart is together is None) or torch.equal(apart.view(torch.uint8), together.view(torch.uint8))


def test_blocks_that_are_not_contiguous_are_refused(kernels: native.Kernels) -> None:
    values = make_case(**MIXED, kv_dtype=torch.int8).values()
    caches = [values[name] for name in CACHES]
    for name, apart in zip(CACHES, InRows(caches).copies, strict=True):
        with pytest.raises(ValueError, match=f"k{name[1:]} and v{name[1:]} must have the same strides"):
            kernels.run("paged_attention", *(values | {name: apart}).values())
        wide = torch.zeros(*apart.shape[:-1], 2 * apart.shape[-1], dtype=apart.dtype)
        with pytest.raises(ValueError, match=f"{name} must have contiguous blocks, got strides"):
            kernels.run("paged_attention", *(values | {name: wide[..., ::2]}).values())


@pytest.mark.battery
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_software_tiles_are_those_of_the_cpu(kernels: native.Kernels, kv_dtype: torch.dtype | None) -> None:
    """Bit for bit, so what holds for the one holds for the other."""
    skip_without(kernels, "amx")
    case = make_case(**MIXED, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    of_the_cpu, in_software = (attend_on(kernels, isa)(*case.args()) for isa in ("amx", "amx_in_software"))
    assert torch.equal(of_the_cpu, in_software)


@EXACT
@every_set
@pytest.mark.usefixtures("two_threads")
def test_a_shared_prefix_changes_no_bit(attend: Attend, options: dict) -> None:
    """The first two requests share three partitions, the next two one and a half; the last, less than it pays for.

    Without a window, which would hide the beginning.
    """
    query_lens, context_lens = [1, 3, 1, 2, 1], [1700, 1690, 800, 1100, 600]
    case = make_case(query_lens, context_lens, num_heads=8, head_dim=64, **{**options, "window": 0})
    case = with_shared_prefixes(case, ((1, 0, 1536), (3, 2, 768), (4, 0, 512)))
    together = attend(*case.args())
    for request in range(len(query_lens)):
        assert torch.equal(attend(*alone(case, request).args()), together[case.rows(request)])
    check(case, attend)


@EXACT
@pytest.mark.parametrize("group", [5, *(pytest.param(group, marks=pytest.mark.battery) for group in (1, 2))])
@every_set
def test_chunking_changes_no_bit(attend: Attend, group: int, options: dict) -> None:
    """A prompt in one step, in chunks, or token by token at its end: the same output for every token."""
    case = make_case([700], [0], num_heads=2 * group, head_dim=64, **options)
    chunks = (1, 480, 30, 65, 60, 60, 1, 1, 2)
    assert torch.equal(in_chunks(case, chunks, attend), attend(*case.args()))


@pytest.mark.usefixtures("two_threads")
@EXACT
@pytest.mark.parametrize("name", ["decode-fused-padding", "everything"])
def test_threads_change_no_bit(attend: Attend, name: str, options: dict) -> None:
    case = make_case(**CASES[name], **options)
    with_two = attend(*case.args())
    torch.set_num_threads(1)
    assert torch.equal(attend(*case.args()), with_two)
