"""Ranks choose the token that one process chooses of all logits, bit for bit: every filter, instruction set, size."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import RankGroup, native, sample_tokens_of_ranks
from compiled_llm.ops.kernel_build import isas_of
from compiled_llm.ops.sampling import rank_sampling
from compiled_llm.ops.sampling.noise import HALVING, token_noise
from compiled_llm.ops.sampling.reference import LOG2_E, NO_TOKEN, depths, sample_tokens_reference
from tests.ops.instruction_sets import by_set, ordinary_sets, skip_without
from tests.ops.parallel.ranks import run_ranks
from tests.ops.sampling.sampling_cases import DTYPES, OFF, SamplingCase, extreme_case, grid, make_case

OP = "sampling_cpu"
CHUNK = 256
BEST = ordinary_sets(OP)[0]
VOCABULARIES = (1, 255, 257, 4096, 20011)  # the first three leave ranks without a token


def own_logits(logits: Tensor, rank: int, size: int) -> Tensor:
    """Of a rank: equal shares of whole chunks, past the vocabulary the last token again."""
    width = -(-logits.shape[1] // size // CHUNK) * CHUNK
    return logits[:, (torch.arange(width) + rank * width).clamp(max=logits.shape[1] - 1)].contiguous()


def chosen_by_ranks(case: SamplingCase, size: int, isa: str, piece: int = 1 << 16) -> list[Tensor]:
    """What each rank gives."""

    def run(rank: int, group: RankGroup) -> Tensor:
        arguments = (own_logits(case.logits, rank, size), *case[1:], *group, case.logits.shape[1])
        if isa == "reference":
            return rank_sampling._reference(*arguments)
        return native.load(OP).run("sample_tokens_of_ranks", *arguments, isa=isa)

    return run_ranks(size, run, piece)


def assert_as_one(case: SamplingCase, size: int, isa: str, piece: int = 1 << 16) -> None:
    wanted = native.load(OP).run("sample_tokens", *case, isa=isa)
    for tokens in chosen_by_ranks(case, size, isa, piece):
        assert torch.equal(tokens, wanted)


@functools.cache
def all_cases() -> list[SamplingCase]:
    made = [make_case(**how, rows=19) for _, how in grid(VOCABULARIES)]
    return made + [extreme_case(vocabulary, dtype) for vocabulary in (1, 600, 4096) for dtype in DTYPES]


@pytest.mark.parametrize(
    ("isa", "size"),
    [
        pytest.param(isa, size, marks=() if (isa, size) in ((BEST, 3), ("portable", 1)) else pytest.mark.battery)
        for isa in isas_of(OP)
        for size in (1, 2, 3, 4)
    ],
)
def test_the_token_that_one_process_chooses(isa: str, size: int) -> None:
    skip_without(native.load(OP), isa)
    for case in all_cases():
        assert_as_one(case, size, isa)


@pytest.mark.parametrize("isa", by_set(OP))
def test_every_end_of_a_search_for_top_k(isa: str) -> None:
    """One token, as many as there are chunks, as a rank has tokens, all but one; and more where many are equal."""
    skip_without(native.load(OP), isa)
    ks = [*range(1, 40), *range(40, 4090, 61), *range(2046, 2050), *range(4090, 4100)]
    for pattern, top_ps in itertools.product(("normal", "few-values", "equal"), ((1.0,), (0.3, 0.95))):
        case = make_case(4096, pattern=pattern, rows=len(ks), top_ps=top_ps, min_ps=(0.0,), top_n_sigmas=(0.0,))
        assert_as_one(case._replace(top_k=torch.tensor(ks, dtype=torch.int32)), 2, isa)


@pytest.mark.parametrize("isa", by_set(OP))
def test_many_ends_of_a_search_for_top_p(isa: str) -> None:
    skip_without(native.load(OP), isa)
    for pattern, scale in itertools.product(("normal", "few-values", "peaked"), (0.3, 4.0)):
        case = make_case(
            9000, pattern=pattern, scale=scale, rows=60, temperatures=(0.7, 1.0), top_ks=(OFF,), min_ps=(0.0,),
            top_n_sigmas=(0.0,),
        )  # fmt: skip
        assert_as_one(case._replace(top_p=torch.linspace(0.001, 0.999, 60)), 3, isa)


def test_pieces_of_any_size() -> None:
    """What ranks tell each other may be more than they exchange at once."""
    for case in (make_case(4096, rows=40), make_case(9000, rows=40, pattern="few-values")):
        assert_as_one(case, 2, BEST, piece=128)


def test_each_row_by_itself() -> None:
    """A row's token depends on none of the others, which decide how many are looked at together."""
    case = make_case(4096, rows=40)
    wanted = chosen_by_ranks(case, 2, BEST)[0]
    for row in range(0, 40, 7):
        assert chosen_by_ranks(case.rows(slice(row, row + 1)), 2, BEST)[1] == wanted[row]


def test_ranks_with_other_numbers_of_threads_choose_the_same_rows_at_once() -> None:
    """As where cores are not divided evenly. No filters: ranks that disagree are wrong, and do not hang."""
    off = {"top_ks": (OFF,), "top_ps": (1.0,), "min_ps": (0.0,), "top_n_sigmas": (0.0,)}
    case = make_case(4096, rows=40, temperatures=(1.0,), **off)
    before = torch.get_num_threads()

    def run(rank: int, group: RankGroup) -> Tensor:
        torch.set_num_threads(9 if rank else 1)  # of this thread
        return sample_tokens_of_ranks(own_logits(case.logits, rank, 2), *case[1:], group=group, vocab_size=4096)

    try:
        found = run_ranks(2, run)
    finally:
        torch.set_num_threads(before)
    for tokens in found:
        assert torch.equal(tokens, torch.ops.compiled_llm.sample_tokens(*case))


def test_the_reference_gathers_and_samples() -> None:
    case = make_case(700, rows=40)
    for tokens in chosen_by_ranks(case, 2, "reference"):
        assert torch.equal(tokens, sample_tokens_reference(*case))


def test_equal_draws_go_to_the_lowest_token() -> None:
    """Without noise to tell them apart, tokens of the largest logit are equal: a rank's first, of the first rank."""
    logits = torch.zeros(3, 1024)
    logits[0, 300], logits[0, 900] = 2.0, 2.0
    logits[1, 700], logits[1, 1023] = 2.0, 2.0
    logits[2] = float("nan")
    case = make_case(1024, rows=3, temperatures=(0.0,))._replace(logits=logits)
    for tokens in chosen_by_ranks(case, 4, BEST):
        assert tokens.tolist() == [300, 700, NO_TOKEN]


def test_of_equal_sums_of_noise_and_weight_the_lowest_token_wins() -> None:
    """Two tokens of two ranks, with logits that make up for their noise to the last unit; in both orders."""
    rows, seed = 24, torch.arange(24)
    position, temperature = torch.zeros(rows, dtype=torch.int32), torch.ones(rows)
    tokens = torch.stack((seed * 3 + 1, 511 - seed), 1)
    noise = token_noise(seed[:, None], position[:, None], tokens).long()
    lead = (noise - noise.amin(1, keepdim=True)).double()
    pair = (-lead / (LOG2_E * HALVING)).float()
    for _ in range(20):  # until the depth of the likelier one is its lead
        pair += ((depths(pair, temperature) - lead) / (LOG2_E * HALVING)).float()
    depth = depths(pair, temperature).long()
    tied = ((noise - depth).diff() == 0).flatten()
    assert tied.sum() > 4
    logits = torch.full((rows, 512), float("-inf")).scatter(1, tokens, pair)
    case = make_case(
        512, rows=rows, temperatures=(1.0,), top_ks=(OFF,), top_ps=(1.0,), min_ps=(0.0,), top_n_sigmas=(0.0,)
    )
    case = case._replace(logits=logits, seed=seed, position=position)
    for found in chosen_by_ranks(case, 2, BEST):
        assert torch.equal(found[tied], tokens[tied, 0])


def test_it_is_registered_and_refuses_parts_of_chunks() -> None:
    case, alone = make_case(512, rows=3), RankGroup.alone()
    wanted = torch.ops.compiled_llm.sample_tokens(*case)
    assert torch.equal(sample_tokens_of_ranks(*case, group=alone, vocab_size=512), wanted)
    torch.library.opcheck(torch.ops.compiled_llm.sample_tokens_of_ranks.default, (*case, *alone, 512))
    for logits, vocab_size in ((case.logits[:, :300], 300), (case.logits, 513), (case.logits, 0)):
        with pytest.raises(ValueError, match="ranks must have whole chunks of 256 tokens"):
            sample_tokens_of_ranks(logits, *case[1:], group=alone, vocab_size=vocab_size)
