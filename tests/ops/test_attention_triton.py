"""The Triton kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs.

Triton decides at import whether it interprets, so the interpreted cases run in one child process: this file as a
program, with TRITON_INTERPRET=1. It prints one JSON object, name of a case -> its traceback, or an empty string.
"""

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest
import torch

from tests.ops.attention_cases import AttentionCase, check, grid, make_case

triton = pytest.importorskip("triton")

from compiled_llm.ops import attention_triton  # noqa: E402

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = {(8, 0): 163 * 1024, (9, 0): 227 * 1024}  # what one program may take


def alone(case: AttentionCase, request: int) -> AttentionCase:
    """One request of a case by itself, its table no wider than it must be."""
    rows = case.rows(request)
    seq_len = int(case.seq_lens[request])
    blocks = max(1, -(-seq_len // case.k_cache.shape[2]))
    return replace(
        case,
        q=case.q[rows],
        k=case.k[rows],
        v=case.v[rows],
        slot_mapping=case.slot_mapping[rows],
        block_table=case.block_table[request : request + 1, :blocks].contiguous(),
        query_start_loc=case.query_start_loc[request : request + 2] - case.query_start_loc[request],
        seq_lens=case.seq_lens[request : request + 1],
        max_query_len=rows.stop - rows.start,
    )


# ---- interpreted ----------------------------------------------------------------------------------------------------

EXTRA = {
    "many-splits": {"query_lens": [1, 1, 1, 1], "context_lens": [255, 256, 257, 1023], "num_heads": 6},
    "more-than-64-splits-of-256": {
        "query_lens": [1],
        "context_lens": [16500],
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
    },
    "splits-in-a-mixed-step": {
        "query_lens": [3, 1, 2, 1],
        "context_lens": [300, 700, 0, 20],
        "padding_query_lens": [0, 1],
        "trailing_rows": 2,
        "fused_qkv": True,
    },
}


def interpreted() -> Iterator[tuple[str, torch.dtype, dict]]:
    """The grid but for what takes an interpreter minutes; float32, whose tiles are small, and float16 on a part."""
    for name, kwargs in (*grid(), *EXTRA.items()):
        if "2000" in name:
            continue
        yield f"bfloat16-{name}", torch.bfloat16, kwargs
        if re.fullmatch(r"(decode|mixed)-(gqa.*-h64|h\d+|gqa5-.*)|prompt.*|chunk.*|only-.*|.*splits.*step", name):
            yield f"float32-{name}", torch.float32, kwargs
        if "gqa4" in name or name == "many-splits":
            yield f"float16-{name}", torch.float16, kwargs


def neighbours_change_nothing() -> None:
    case = make_case(
        [1, 20, 1, 1, 9], [600, 0, 300, 12, 300], padding_query_lens=[1], trailing_rows=2, dtype=torch.bfloat16
    )
    out = check(case, attention_triton.paged_attention)
    for request in range(5):
        assert torch.equal(check(alone(case, request), attention_triton.paged_attention), out[case.rows(request)])


def run_interpreted() -> None:
    def outcome(function: Callable, *args) -> str:
        try:
            function(*args)
        except Exception:
            return traceback.format_exc()
        return ""

    def run(dtype: torch.dtype, kwargs: dict) -> None:
        check(make_case(**kwargs, dtype=dtype), attention_triton.paged_attention)

    torch.set_num_threads(1)
    outcomes = {name: outcome(run, dtype, kwargs) for name, dtype, kwargs in interpreted()}
    outcomes["neighbours"] = outcome(neighbours_change_nothing)
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.ops.test_attention_triton"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("name", [*(name for name, _, _ in interpreted()), "neighbours"])
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: "triton.JITFunction", launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> FunctionType:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def launches(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> list[tuple["triton.JITFunction", tuple, dict]]:
    """What a mixed step launches on a GPU of that capability, from tensors without storage."""
    recorded: list = []
    for name in ("_write_kernel", "_decode_kernel", "_merge_kernel", "_prefill_kernel"):
        monkeypatch.setattr(attention_triton, name, Recorder(getattr(attention_triton, name), recorded))
    monkeypatch.setattr(attention_triton, "_device_facts", lambda device: (capability, 132))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_tokens, num_requests, num_heads, num_kv_heads, block_size, table_width = 512, 32, 32, 8, 16, 512
    qkv = empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    caches = [empty(1024, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
    attention_triton.paged_attention(
        *qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1),
        *caches,
        empty(num_tokens),
        empty(num_requests, table_width),
        empty(num_requests + 1),
        empty(num_requests),
        head_dim**-0.5,
        num_tokens,
    )
    monkeypatch.undo()
    return recorded


def compiled(kernel: "triton.JITFunction", args: tuple, kwargs: dict, capability: tuple[int, int]):
    """The launch compiled for a GPU that is not there, specialised as a launch on one would be."""
    from triton.backends.compiler import GPUTarget

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = values[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            tensor = isinstance(value, torch.Tensor)
            signature[name] = f"*{names[value.dtype]}" if tensor else "i32"
            if tensor or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_compiles_without_spills(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    recorded = launches(monkeypatch, capability, head_dim, dtype)
    assert len(recorded) == 4
    for kernel, args, kwargs in recorded:
        binary = compiled(kernel, args, kwargs, capability)
        cubin = tmp_path / f"{kernel.__name__}.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        dump = subprocess.run(
            [disassembler, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        )
        usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout)}
        shared = binary.metadata.shared
        print(f"{kernel.__name__}: {usage['REG']} registers, {shared} bytes of shared memory")
        assert usage["STACK"] == 0
        assert usage["LOCAL"] == 0
        assert shared < SHARED_MEMORY[capability]


def test_float32_fits_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tiles of float32; its speed, and so a few spilled bytes, are of no interest."""
    for kernel, args, kwargs in launches(monkeypatch, (8, 0), 256, torch.float32):
        assert compiled(kernel, args, kwargs, (8, 0)).metadata.shared < 99 * 1024


def test_a_head_dim_without_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 512"):
        attention_triton.tile_config(512, 2, (9, 0))


if __name__ == "__main__":
    run_interpreted()
