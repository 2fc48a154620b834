"""Bytes of sums and joins over ranks, each counted by hand: 8 rows of 4,096 in bfloat16 are 64 KiB."""

from typing import Any

import pytest
import torch

from compiled_llm.gpu_step.amounts import Contexts, Work
from compiled_llm.gpu_step.launches import Launch, TritonKernel
from compiled_llm.gpu_step.work import work_of

triton = pytest.importorskip("triton")

from compiled_llm.ops.parallel import triton_kernels, triton_reductions  # noqa: E402
from tests.ops import ahead_of_time  # noqa: E402

KIB = 1024


def work(op: str, x: torch.Tensor, size: int, *arguments: Any) -> Work:
    place = torch.empty(1 + size, dtype=torch.int64, device="meta")
    memory = torch.empty(triton_reductions.bytes_on_gpu(), dtype=torch.uint8, device="meta")
    with ahead_of_time.recorded((9, 0), triton_kernels, triton_reductions) as recorded:
        getattr(triton_reductions, op)(x, place, memory, *arguments)
    [(kernel, args, named)] = recorded
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    launch = TritonKernel(kernel, values, {}, (16,))
    return work_of(Launch(kernel.__name__, "op", op, (), (), launch), Contexts(8, 1, 1024))


def test_sums() -> None:
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    one_shot = work("all_reduce", x, 4)
    assert one_shot.read == (64 + 64) * KIB  # the rank's tensor and its own slot
    assert one_shot.written == (64 + 64) * KIB  # its slot and the sum
    assert one_shot.over_links == 3 * 64 * KIB
    large = work("all_reduce", x.new_empty(512, 4096), 4)  # two-shot: 4 MiB, a section of 1 MiB
    assert large.read == (4096 + 1024 + 1024) * KIB
    assert large.written == (4096 + 1024 + 4096) * KIB
    assert large.over_links == 3 * (1024 + 1024) * KIB


def test_exact_sums_exchange_float32() -> None:
    joined = work("join_parts", torch.empty(4, 8, 4096, device="meta"), 2, 2, "bfloat16")
    assert joined.read == (4 * 128 + 128) * KIB
    assert joined.written == (128 + 64) * KIB
    assert joined.over_links == 128 * KIB


def test_joins() -> None:
    joined = work("all_gather", torch.empty(8, 2, dtype=torch.float64, device="meta"), 8, 8)
    assert (joined.read, joined.written, joined.over_links) == (2 * 128, 128 + 8 * 128, 7 * 128)
