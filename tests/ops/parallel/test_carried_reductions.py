"""Sums and joins that another library carries: gloo here, in NCCL's place. The bits are those of the CPU's ops."""

import os

import pytest
import torch
import torch.distributed
from torch import Tensor

from compiled_llm.ops import RankGroup
from compiled_llm.ops.parallel import carried_reductions, triton_reductions
from tests.ops.parallel import ranks as on_cpu
from tests.ops.parallel.gpu_ranks import run_ranks
from tests.ops.parallel.test_triton_reductions import ROUNDS, References, every_op


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.battery)])
def test_the_bits_of_the_cpus_ops(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole to all, and by sections."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def of_cpu(rank: int, group: RankGroup) -> list[list[Tensor]]:
        return [every_op(rank, size, number, References, group) for number in range(len(ROUNDS))]

    expected = on_cpu.run_ranks(size, of_cpu)
    meeting = os.memfd_create("meeting")

    def run(rank: int, place: Tensor, memory: Tensor) -> None:
        store = torch.distributed.FileStore(f"/proc/self/fd/{meeting}", size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        for limit in (0, 1 << 40):
            carried_reductions.ONE_SHOT_BYTES = limit
            for number in range(len(ROUNDS)):
                found = every_op(rank, size, number, triton_reductions, (place, memory[:0]))
                for one, right in zip(found, expected[rank][number], strict=True):
                    assert one.dtype == right.dtype
                    assert torch.equal(one, right), (number, one, right)
        torch.distributed.destroy_process_group()

    wrong = run_ranks(size, run)
    os.close(meeting)
    assert not wrong, wrong
