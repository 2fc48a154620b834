"""The exact attention kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs.

As in ``test_triton_attention.py``, the interpreted cases run in one child process: this file as a program, with
TRITON_INTERPRET=1. It reads a line, a JSON list of names, and prints one JSON object: name of a case -> its traceback,
or an empty string.
"""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.attention.tiles import exact_tile
from tests.ops.attention.attention_cases import CACHES, KV_DTYPES, AttentionCase, alone, check, grid, make_case

triton = pytest.importorskip("triton")

from compiled_llm.ops.attention import triton_attention, triton_exact  # noqa: E402
from tests.drawn import marked  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

OP = triton_exact.paged_attention
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(**kwargs) -> None:
    check(make_case(**kwargs), OP)


def steps_of(
    whole: AttentionCase, case: AttentionCase, start: int, plan: Sequence[int], loose: bool
) -> tuple[Tensor, AttentionCase]:
    """A prompt, which has a case to itself, from token ``start`` on in steps of so many tokens.

    Each step reads what those before it wrote to the caches, first those of ``case``. ``loose``: the steps say that
    they may have any number of tokens, as mixed ones do. Returns the rows, and the last step with the caches after it.
    """
    outs = []
    for length in plan:
        rows = slice(start, start + length)
        step = replace(
            case,
            **{name: getattr(whole, name)[rows] for name in ("q", "k", "v", "slot_mapping")},
            query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=whole.q.device),
            seq_lens=torch.tensor([start + length], dtype=torch.int32, device=whole.q.device),
            max_query_len=2048 if loose else length,
        )
        args = step.args()
        outs.append(OP(*args))
        case = replace(step, **dict(zip(CACHES, args[3:7], strict=True)))
        start += length
    return torch.cat(outs), case


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def chunks_change_no_bit(length: int = 522, device: str = "cpu", **kwargs) -> None:
    """One chunk, several, decodes, drafts; whether partitions are folded in registers or by the merge kernel."""
    case = make_case([length], [0], device=device, **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, **kwargs})
    case.v[-1].mul_(20)  # so its scale is far above the others, which no row before it may notice
    whole, before = check(case, OP), length - 22
    first, cached = steps_of(case, alone(case, 0), 0, (before,), False)
    assert torch.equal(bits(first), bits(whole[:before]))
    for plan, loose in (
        ((22,), False),
        ((16, *[1] * 6), False),  # drafts and decodes
        ((16, 4, 1, 1), True),  # the same folded in registers
    ):
        assert torch.equal(bits(steps_of(case, cached, before, plan, loose)[0]), bits(whole[before:])), (plan, loose)


def neighbours_change_no_bit(**kwargs) -> None:
    query_lens, context_lens = [1, 20, 1, 1, 9, 4], [600, 0, 300, 12, 300, 513]
    case = make_case(query_lens, context_lens, padding_query_lens=[1], trailing_rows=2, **kwargs)
    out = check(case, OP)
    for request in range(len(query_lens)):
        assert torch.equal(bits(OP(*alone(case, request).args())), bits(out[case.rows(request)]))


FEATURES = {"window": 290, "soft_cap": 3.0, "sinks": True}
GRID = dict(grid())
AGREES = [
    "mixed-gqa1-h64", "mixed-gqa5-h128", "mixed-gqa8-h256", "decode-gqa7-h64", "mixed-h40", "mixed-h80", "mixed-h512",
    "chunk-after17-block16", "window-of-one", "only-padding",
    "window-soft-cap-sinks-h96", "decode-loose-max-query-len",
]  # fmt: skip
CASES: dict[str, tuple[Callable, dict]] = {
    **{f"agrees-{name}": (agrees_with_the_reference, {**GRID[name], "dtype": BF16}) for name in AGREES},
    **{
        f"agrees-{name}-{str(dtype)[6:]}-{kv_dtype}": (
            agrees_with_the_reference,
            {**GRID[name], "dtype": dtype, "kv_dtype": KV_DTYPES.get(kv_dtype)},
        )
        for name, dtype, kv_dtype in (
            ("mixed-gqa4-h64", FP32, ""),
            ("mixed-gqa4-h64", FP32, "int8"),
            ("mixed-gqa4-h128", FP16, ""),
            ("mixed-gqa4-h64", FP16, "int8"),
            ("short-queries", BF16, "int8"),
            ("mixed-gqa5-h64", BF16, "fp8"),
        )
    },
    "chunks": (chunks_change_no_bit, {"dtype": BF16}),
    "chunks-of-two-partitions": (chunks_change_no_bit, {"dtype": BF16, "length": 266, **FEATURES}),
    "chunks-of-two-partitions-int8": (
        chunks_change_no_bit,
        {"dtype": FP16, "length": 266, "kv_dtype": torch.int8, "window": 12},
    ),
    "chunks-features": (chunks_change_no_bit, {"dtype": BF16, **FEATURES}),
    "chunks-gqa8-h80": (chunks_change_no_bit, {"dtype": BF16, "num_heads": 8, "head_dim": 80}),
    "chunks-gqa5": (chunks_change_no_bit, {"dtype": FP16, "num_heads": 5, "window": 100}),
    "chunks-int8": (chunks_change_no_bit, {"dtype": BF16, "kv_dtype": torch.int8}),
    "chunks-int8-features": (chunks_change_no_bit, {"dtype": FP16, "kv_dtype": torch.int8, **FEATURES}),
    "chunks-fp8": (chunks_change_no_bit, {"dtype": BF16, "kv_dtype": torch.float8_e4m3fn}),
    "chunks-float32": (chunks_change_no_bit, {"dtype": FP32}),
    "neighbours": (neighbours_change_no_bit, {"dtype": BF16}),
    "neighbours-int8-features": (neighbours_change_no_bit, {"dtype": BF16, "kv_dtype": torch.int8, **FEATURES}),
}


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launches(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], requests: int, tokens: int, head_dim: int, **options
) -> list[tuple["triton.JITFunction", tuple, dict]]:
    """What a step of so many requests and tokens launches, from tensors without storage; at least one has 17 rows."""
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_attention, triton_exact)
    dtype, kv_dtype, features = (options.get(name) for name in ("dtype", "kv_dtype", "features"))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_heads, num_kv_heads, block_size = 32, 8, 16
    qkv = empty(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    caches = [empty(1024, num_kv_heads, block_size, head_dim, dtype=kv_dtype or dtype) for _ in range(2)]
    scales = [empty(1024, num_kv_heads, block_size, dtype=FP32) if kv_dtype else None for _ in range(2)]
    OP(
        *qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1),
        *caches,
        *scales,
        empty(tokens),
        empty(requests, 2048),
        empty(requests + 1),
        empty(requests),
        empty(num_heads, dtype=FP32) if features else None,
        head_dim**-0.5,
        tokens if tokens > requests else 1,
        1024 if features else 0,
        30.0 if features else 0.0,
    )
    monkeypatch.undo()
    return [launch for launch in recorded if launch[0].__name__ != "write_kernel"]


def how_it_adds_up(binary: "triton.compiler.CompiledKernel") -> tuple[list[str], list[str]]:
    """The layouts of products, and their instructions with their sizes."""
    layouts = sorted(set(re.findall(r"#ttg\.nvidia_mma<\{.*?\}>|#ttg\.blocked<.*?>(?=.*tt\.dot)", binary.asm["ttgir"])))
    return layouts, sorted(set(re.findall(r"(?:wgmma\.mma_async|\bmma\.sync)\S+", binary.asm["ptx"])))


@pytest.mark.parametrize(
    ("capability", "head_dim", "options"),
    [
        ((9, 0), 128, {"dtype": BF16}),
        pytest.param((8, 0), 128, {"dtype": BF16, "kv_dtype": torch.int8}, marks=pytest.mark.battery),
        pytest.param((9, 0), 64, {"dtype": FP16, "kv_dtype": torch.int8, "features": True}, marks=pytest.mark.battery),
        pytest.param((8, 0), 256, {"dtype": BF16, "features": True}, marks=pytest.mark.battery),
        pytest.param((9, 0), 256, {"dtype": BF16, "kv_dtype": torch.float8_e4m3fn}, marks=pytest.mark.battery),
        pytest.param((8, 0), 512, {"dtype": BF16}, marks=pytest.mark.battery),
        pytest.param((9, 0), 512, {"dtype": BF16, "kv_dtype": torch.int8}, marks=pytest.mark.battery),
        pytest.param((9, 0), 512, {"dtype": BF16, "features": True}, marks=pytest.mark.battery),
        pytest.param((8, 0), 512, {"dtype": FP32}, marks=pytest.mark.battery),
        pytest.param((8, 0), 64, {"dtype": FP32}, marks=pytest.mark.battery),
        pytest.param((8, 0), 128, {"dtype": FP32}, marks=pytest.mark.battery),
    ],
    ids=str,
)
def test_every_launch_adds_up_alike(
    capability: tuple[int, int],
    head_dim: int,
    options: dict,
    child: subprocess.Popen,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Decodes and chunks, of few requests and of many: tiles of one layout, instructions of one kind and size."""
    seen = []
    for requests, tokens in ((1, 1), (32, 512)):
        for kernel, args, kwargs in launches(monkeypatch, capability, requests, tokens, head_dim, **options):
            binary = ahead_of_time.compiled(kernel, args, kwargs, capability)
            usage = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin")
            print(f"{kernel.__name__}: {usage['REG']} registers, {binary.metadata.shared} bytes of shared memory")
            # Of heads of 256 a prompt's tile, which has two states at a time, is a little more than registers hold.
            spilled = 128 if head_dim == 256 and kwargs.get("WHOLE") else 0
            assert max(usage["STACK"], usage["LOCAL"]) <= spilled, kernel.__name__
            assert binary.metadata.shared < 99 * 1024
            if kernel.__name__ == "exact_attention_kernel":
                seen.append(how_it_adds_up(binary))
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    of_16_bits = "wgmma" if capability[0] == 9 and head_dim < 512 else "mma.sync"
    kind = {FP32: None, **dict.fromkeys((BF16, FP16), of_16_bits)}
    if kind[options["dtype"]]:
        assert seen[0][1]
        assert all(kind[options["dtype"]] in instruction for instruction in seen[0][1])


def test_a_head_dim_without_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 1024"):
        exact_tile(1024, 2, 2)


# ---- the outcomes of the interpreter ---------------------------------------------------------------------------------


ORDINARY = (
    *("agrees-mixed-gqa1-h64", "agrees-decode-gqa7-h64", "agrees-mixed-h40", "agrees-chunk-after17-block16"),
    *("agrees-only-padding", "agrees-window-soft-cap-sinks-h96", "agrees-mixed-gqa4-h64-float32-int8"),
    *("agrees-mixed-gqa5-h64-bfloat16-fp8", "neighbours-int8-features"),
)


@pytest.mark.parametrize("name", marked(CASES, ORDINARY))
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("chunks")])
def test_on_a_gpu_chunks_change_no_bit(name: str) -> None:
    kwargs = CASES[name][1]
    chunks_change_no_bit(**kwargs, device="cuda")
    large = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **kwargs, "length": 3000}
    chunks_change_no_bit(**large, device="cuda")


if __name__ == "__main__":
    interpreted.run(CASES)
