"""Ranks get the bits of ``log_sum_exp`` of all logits, whatever parts of chunks they have."""

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import RankGroup, log_sum_exp_of_ranks, native
from compiled_llm.ops.rowwise import rowwise
from compiled_llm.ops.rowwise.reference import log_sum_exp_reference
from tests.ops.instruction_sets import by_set, skip_without
from tests.ops.parallel.ranks import run_ranks

OP = "rowwise_cpu"


def of_ranks(logits: Tensor, size: int, isa: str, unit: int, piece: int = 1 << 16) -> list[tuple[Tensor, Tensor]]:
    """What each rank gives, with a multiple of ``unit`` tokens. Past the vocabulary is what must not be looked at."""
    rows, vocab_size = logits.shape
    width = -(-vocab_size // size // unit) * unit
    padded = torch.full((rows, width * size), float("nan"), dtype=logits.dtype)
    padded[:, :vocab_size] = logits

    def run(rank: int, group: RankGroup) -> tuple[Tensor, Tensor]:
        arguments = padded[:, rank * width : (rank + 1) * width].contiguous(), *group, vocab_size
        if isa == "reference":
            return rowwise._log_sum_exp_of_ranks_reference(*arguments)
        return native.load(OP).run("log_sum_exp_of_ranks", *arguments, isa=isa)

    return run_ranks(size, run, piece)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", by_set(OP))
def test_the_bits_of_one_process(isa: str, dtype: torch.dtype) -> None:
    kernels = skip_without(native.load(OP), isa)
    for vocab_size, size in ((1, 2), (1024, 1), (2047, 2), (1500, 8), (3000, 4), (20011, 2), (20011, 3)):
        logits = (torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(size)) * 5).to(dtype)
        logits[1], logits[2, : vocab_size // 2] = float("-inf"), float("-inf")
        wanted = kernels.run("log_sum_exp", logits, isa=isa)
        for unit, piece in ((1, 1 << 16), (256, 128), (1024, 1 << 16)):
            for found in of_ranks(logits, size, isa, unit, piece):
                for one, other in zip(found, wanted, strict=True):
                    assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_the_reference_gathers() -> None:
    logits = torch.randn(3, 1500)
    for found in of_ranks(logits, 2, "reference", 1):
        assert [one.tolist() for one in found] == [other.tolist() for other in log_sum_exp_reference(logits)]


def test_it_is_registered_and_refuses_parts_of_a_vocabulary() -> None:
    logits, alone = torch.randn(3, 2048), RankGroup.alone()
    torch.library.opcheck(torch.ops.compiled_llm.log_sum_exp_of_ranks.default, (logits, *alone, 2048))
    for vocab_size in (2049, 0):
        with pytest.raises(
            ValueError, match=f"ranks must have all of the vocabulary, got 2048 of {vocab_size} in each"
        ):
            log_sum_exp_of_ranks(logits, alone, vocab_size)
