"""The CPU's attention kernel to the bit: neighbours, chunks, shared prefixes and threads change nothing."""

from dataclasses import replace

import pytest
import torch

from compiled_llm.ops import native
from tests.ops.attention.attention_cases import alone, check, grid, make_case
from tests.ops.attention.cpu_kernel import Attend, attend_on, every_set
from tests.ops.instruction_sets import skip_without

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


def exact(options: list[dict]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "options", options, ids=lambda one: "-".join(str(value).removeprefix("torch.") for value in one.values())
    )


EXACT = exact(EXACT_OPTIONS)


@EXACT
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_neighbours_change_no_bit(attend: Attend, kind: str, options: dict) -> None:
    query_lens, context_lens = (
        ([1] * 4, [1300, 5, 511, 60]) if kind == "decode" else ([1, 70, 1, 9], [1300, 513, 64, 0])
    )
    case = make_case(query_lens, context_lens, num_heads=8, head_dim=128, trailing_rows=3, **options)
    together = attend(*case.args())
    for request in range(len(query_lens)):
        assert torch.equal(attend(*alone(case, request).args()), together[case.rows(request)])


@pytest.mark.battery
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_software_tiles_are_those_of_the_cpu(kernels: native.Kernels, kv_dtype: torch.dtype | None) -> None:
    """Bit for bit, so what holds for the one holds for the other."""
    skip_without(kernels, "amx")
    case = make_case(**MIXED, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    of_the_cpu, in_software = (attend_on(kernels, isa)(*case.args()) for isa in ("amx", "amx_in_software"))
    assert torch.equal(of_the_cpu, in_software)


# A window hides the beginning, so nothing is shared.
@exact([{**options, "window": 0} for options in EXACT_OPTIONS])
@every_set
@pytest.mark.usefixtures("two_threads")
def test_a_shared_prefix_changes_no_bit(attend: Attend, options: dict) -> None:
    """The first two requests share three partitions, the next two one and a half; the last, less than it pays for."""
    query_lens, context_lens = [1, 3, 1, 2, 1], [1700, 1690, 800, 1100, 600]
    case = make_case(query_lens, context_lens, num_heads=8, head_dim=64, **options)
    block_size = case.k_cache.shape[2]
    table = case.block_table.clone()
    for request, other, tokens in ((1, 0, 1536), (3, 2, 768), (4, 0, 512)):
        table[request, : tokens // block_size] = table[other, : tokens // block_size]
    case = replace(case, block_table=table)
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
    whole = attend(*case.args())
    caches = case.args()[3:7]
    start, parts = 0, []
    for length in (1, 480, 30, 65, 60, 60, 1, 1, 2):
        rows = slice(start, start + length)
        chunk = replace(
            case,
            q=case.q[rows],
            k=case.k[rows],
            v=case.v[rows],
            slot_mapping=case.slot_mapping[rows],
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([start + length], dtype=torch.int32),
        )
        args = list(chunk.args())
        args[3:7] = caches
        parts.append(attend(*args))
        start += length
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("two_threads")
@EXACT
@pytest.mark.parametrize("name", ["decode-block16", "decode-fused-padding", "everything", "prompt2000-block16"])
def test_threads_change_no_bit(attend: Attend, name: str, options: dict) -> None:
    case = make_case(**CASES[name], **options)
    with_two = attend(*case.args())
    torch.set_num_threads(1)
    assert torch.equal(attend(*case.args()), with_two)
