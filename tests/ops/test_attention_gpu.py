"""The op on a GPU against the reference, at the sizes models have, captured in a CUDA graph, and past 2^31 elements."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate

import pytest
import torch

from compiled_llm.ops.attention import paged_attention_reference
from tests.ops.attention_cases import PADDING_BLOCK, AttentionCase, check, grid, make_case
from tests.ops.test_attention_triton import EXTRA, alone

pytestmark = pytest.mark.gpu

OP = torch.ops.compiled_llm.paged_attention
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
MODELS = {
    "qwen3-0.6b": {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "fused_qkv": True},
    "llama-8b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "fused_qkv": True},
}
STEPS = {
    "decode-1-short": {"query_lens": [1], "context_lens": [40]},
    "decode-1": {"query_lens": [1], "context_lens": [8191]},
    "decode-8": {"query_lens": [1] * 8, "context_lens": [8191, 4096, 2047, 1023, 256, 255, 15, 0]},
    "decode-32": {
        "query_lens": [1] * 29,
        "context_lens": [8000, *range(100, 1500, 50)],
        "padding_query_lens": [1] * 3,
    },
    "prompts": {"query_lens": [2048, 500, 17], "context_lens": [0, 0, 0], "trailing_rows": 11},
    "mixed": {
        "query_lens": [1] * 20 + [512, 100, 2],
        "context_lens": [7000, *range(60, 1200, 60), 4096, 0, 3333],
        "padding_query_lens": [0, 1, 4],
        "trailing_rows": 7,
    },
}


def with_lengths(case: AttentionCase, query_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionCase:
    """Other lengths in tensors of the same shapes. A request's past may be no longer than it was: more is poison."""
    block_size, device = case.k_cache.shape[2], case.q.device
    starts = [0, *accumulate(query_lens)]
    table = case.block_table.long().cpu()
    slots = torch.full((case.q.shape[0],), PADDING_BLOCK * block_size)
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if seq_len > 0:
            positions = torch.arange(seq_len - query_len, seq_len)
            blocks = table[request, positions // block_size]
            slots[starts[request] : starts[request + 1]] = blocks * block_size + positions % block_size
    return replace(
        case,
        slot_mapping=slots.int().to(device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )


@DTYPES
@pytest.mark.parametrize(("name", "kwargs"), [*grid(), *EXTRA.items()], ids=lambda x: x if isinstance(x, str) else "")
def test_grid(name: str, kwargs: dict, dtype: torch.dtype) -> None:
    check(make_case(**kwargs, dtype=dtype, device="cuda"), OP)


@DTYPES
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_real_sizes(model: str, step: str, dtype: torch.dtype) -> None:
    check(make_case(**MODELS[model], **STEPS[step], dtype=dtype, device="cuda"), OP)


@pytest.mark.parametrize("step", ["decode-8", "mixed"])
def test_a_request_alone_gives_the_same_bits(step: str) -> None:
    case = make_case(**MODELS["qwen3-0.6b"], **STEPS[step], dtype=torch.bfloat16, device="cuda")
    out = OP(*case.args())
    for request in range(len(STEPS[step]["query_lens"])):
        assert torch.equal(OP(*alone(case, request).args()), out[case.rows(request)])


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "others"),
    [
        pytest.param(
            [1] * 8,
            [8191, 3000, 700, 256, 255, 31, 100, 0],
            [
                ([1] * 8, [1, 3001, 257, 256, 0, 0, 16, 1]),
                ([1] * 8, [8192, 1, 701, 1, 255, 17, 0, 0]),
                ([1, 1, 0, 0, 0, 0, 0, 0], [4097, 300, 0, 0, 0, 0, 0, 0]),
            ],
            id="decode",
        ),
        pytest.param(
            [1, 1, 200, 64, 30],
            [2000, 17, 600, 0, 400],
            [
                ([1, 1, 200, 64, 30], [900, 3, 200, 64, 60]),
                ([5, 1, 1, 64, 200], [1500, 18, 601, 64, 430]),
                ([1, 290, 0, 0, 0], [1, 290, 0, 0, 0]),
                ([1, 1, 1, 1, 0], [2001, 18, 0, 1, 0]),
            ],
            id="mixed",
        ),
    ],
)
def test_a_captured_graph_follows_the_lengths(query_lens: list, context_lens: list, others: list) -> None:
    # The longest past and the most blocks that any of the others needs.
    room = [
        max(context, *(seq_lens[r] - min(other[r], query_lens[r]) for other, seq_lens in others))
        for r, context in enumerate(context_lens)
    ]
    base = make_case(
        query_lens,
        room,
        **MODELS["qwen3-0.6b"],
        dtype=torch.bfloat16,
        device="cuda",
        max_query_len=max(max(other) for other in (query_lens, *(other for other, _ in others))),
    )
    tensors = [field.name for field in fields(base) if isinstance(getattr(base, field.name), torch.Tensor)]
    static = base.args()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        OP(*static)  # compiles the kernels, which a capture must not do
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*static)

    for lengths in ((query_lens, [q + c for q, c in zip(query_lens, room, strict=True)]), *others):
        case = with_lengths(base, *lengths)
        for name, buffer in zip(tensors, static, strict=False):  # the tensors come first, in the order of the op
            buffer.copy_(getattr(case, name))
        graph.replay()
        assert torch.equal(out, check(case, OP))


def test_opcheck() -> None:
    """Without poison: it compares the caches, and NaN is unequal to itself."""
    for query_lens in ([1, 1], [30, 1, 5]):
        case = make_case(query_lens, [300, 20, 0][: len(query_lens)], dtype=torch.bfloat16, device="cuda")
        case = replace(case, k_cache=torch.randn_like(case.k_cache), v_cache=torch.randn_like(case.v_cache))
        torch.library.opcheck(OP.default, case.args())


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 200]], ids=["decode", "mixed"])
def test_offsets_beyond_32_bits(query_lens: list[int]) -> None:
    """The same call with its blocks at the end of caches of more than 2^31 elements."""
    small = make_case(query_lens, [900, 300], **MODELS["qwen3-0.6b"], dtype=torch.bfloat16, device="cuda")
    num_blocks, num_kv_heads, block_size, head_dim = small.k_cache.shape
    shift = 2**31 // (num_kv_heads * block_size * head_dim) + 1
    shape = (shift + num_blocks, num_kv_heads, block_size, head_dim)
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of GPU memory")

    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k_cache[shift:], v_cache[shift:] = small.k_cache, small.v_cache
    large = replace(
        small,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=small.slot_mapping + shift * block_size,
        block_table=small.block_table + shift,
    )
    arguments = [getattr(large, field.name) for field in fields(large)]  # not args(): no copies of these caches
    out = OP(*arguments)
    expected_args = small.args()
    assert torch.equal(out, OP(*expected_args))
    torch.testing.assert_close(out, paged_attention_reference(*small.args()), atol=1.5e-2, rtol=1.5e-2)
    for written, wanted in ((k_cache, expected_args[3]), (v_cache, expected_args[4])):
        assert torch.equal(written[shift:].view(torch.int16), wanted.view(torch.int16))
