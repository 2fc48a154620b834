"""The sampling kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.sampling import triton_greedy, triton_noise, triton_sampling
from compiled_llm.ops.sampling.noise import BLOCK, token_noise
from compiled_llm.ops.sampling.reference import NO_TOKEN, greedy_tokens_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty
from tests.ops.sampling.sampling_cases import DTYPES, OFF, SamplingCase, check, extreme_case, grid, make_case

# ---- interpreted ----------------------------------------------------------------------------------------------------


def op(most_listed: int = triton_sampling.MOST_LISTED, splits: int = 1) -> Callable[..., Tensor]:
    """The op with lists of that length, and about so many programs a row."""

    def run(*args: Tensor) -> Tensor:
        sizes = {"MOST_LISTED": most_listed, "PROGRAMS_PER_SM": splits, "_num_sms": lambda device: len(args[0])}
        with mock.patch.multiple(triton_sampling, **sizes):
            return triton_sampling.sample_tokens(*args)

    return run


def of_the_grid(most_listed: int = triton_sampling.MOST_LISTED, splits: int = 1, **kwargs) -> None:
    check(make_case(**kwargs), op(most_listed, splits))


def of_extremes(vocabulary: int, dtype: torch.dtype) -> None:
    check(extreme_case(vocabulary, dtype), op())


@triton.jit
def noise_kernel(seed, position, tokens, out, ELEMENTS: tl.constexpr):
    """The noise of tokens, row by row, as ``draw_kernel`` makes it of those of a block."""
    row, i = tl.program_id(0), tl.arange(0, ELEMENTS)
    token = tl.load(tokens + i)
    block = token // triton_noise.BLOCK
    row_seed, row_position = tl.load(seed + row), tl.load(position + row)
    least, place = triton_noise.least_of_blocks(row_seed, row_position, block)
    more = triton_noise.more_of_tokens(row_seed, row_position, token)
    first = token - block * triton_noise.BLOCK == place
    tl.store(out + row * ELEMENTS + i, triton_noise.gumbel(tl.where(first, least, least + more)))


def noise_has_the_bits_of_the_reference(device: str = "cpu") -> None:
    ends = torch.tensor([0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)])
    seeds = torch.cat([ends, torch.randint(-(2**63), 2**63 - 1, (25,))])
    positions = torch.cat([torch.tensor([0, 1, 2**31 - 1]), torch.randint(2**31 - 1, (29,))]).int()
    tokens = torch.cat([torch.arange(BLOCK), torch.randint(2**22, (1024 - BLOCK,))]).int()
    out = torch.empty(32, 1024, dtype=torch.int32, device=device)
    noise_kernel[(32,)](*(x.to(device) for x in (seeds, positions, tokens)), out, ELEMENTS=1024, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), token_noise(seeds[:, None], positions[:, None], tokens.long()))


# The next five run on a GPU too, where a row in a great many may differ from the reference by rounding.


def no_number_gives_no_token(device: str = "cpu") -> None:
    """Rows of what is banned and what is no number, in any order."""
    for vocabulary in (1, 2, 600):
        logits = torch.full((4, vocabulary), -math.inf)
        logits[1], logits[2, 0], logits[3, -1] = math.nan, math.nan, math.nan
        case = make_case(1, rows=4)._replace(logits=logits).to(device)
        assert (check(case, triton_sampling.sample_tokens) == NO_TOKEN).all()


def strided_rows_give_the_same(dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows of a wider tensor, whose other columns would change every token."""
    case = make_case(700, dtype=dtype, rows=8).to(device)
    tokens = check(case, op(), most_differences=1)
    for start in (0, 5):
        wide = torch.full((16, 800), math.inf, dtype=dtype, device=device)
        logits = wide[::2, start : start + 700]
        logits.copy_(case.logits)
        assert torch.equal(op()(*case._replace(logits=logits)), tokens)


SIZES = ((8, 3), (32, 1), (128, 2), (512, 5), (2048, 128), (triton_sampling.MOST_LISTED, 3))  # of ``op``


def programs_and_neighbours_change_nothing(
    vocabulary: int, rows: int, pattern: str, device: str = "cpu", sizes: Sequence[tuple[int, int]] = SIZES
) -> None:
    """However many programs share a row, whether or not its depths fit into the list, and whatever stands beside it."""
    case = make_case(vocabulary, rows=rows, pattern=pattern, dtype=torch.bfloat16)
    case = case._replace(
        temperature=torch.tensor([1.0, 0.7, 1.5, 0.0]).repeat(rows)[:rows],
        top_k=torch.tensor([50, 1000, OFF, 1], dtype=torch.int32).repeat(rows)[:rows],
    ).to(device)
    tokens = check(case, op(), most_differences=1)
    for most_listed, splits in sizes:
        assert torch.equal(op(most_listed, splits)(*case), tokens)
    order = torch.arange(rows).flip(0).to(device)
    assert torch.equal(triton_sampling.sample_tokens(*case.rows(order)), tokens[order])
    for row in range(rows):
        assert torch.equal(triton_sampling.sample_tokens(*case.rows(slice(row, row + 1))), tokens[row : row + 1])


def greedy_tokens_are_the_first_of_the_largest(dtype: torch.dtype, device: str = "cpu") -> None:
    """Over one part and many, with equal ones in several parts, and with rows that have no token."""
    for vocabulary in (1, 700, triton_greedy.PART, 3 * triton_greedy.PART + 5):
        logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(device, dtype)
        logits[0] = 1.0
        logits[1, ::3] = 9.0
        logits[2, -1] = math.nan
        logits[3, 0] = math.inf
        logits[4] = -math.inf
        logits[5, : vocabulary - 1] = -math.inf
        want = greedy_tokens_reference(logits)
        assert want[2] == want[3] == want[4] == NO_TOKEN
        assert torch.equal(triton_greedy.greedy_tokens(logits), want)
        kept = torch.full((9,), 77, device=device)
        triton_greedy.keep_greedy_tokens(logits, kept)
        assert torch.equal(kept, torch.cat([want, kept.new_full((2,), 77)]))


def a_top_k_below_1_is_1(device: str = "cpu") -> None:
    case = make_case(300, rows=4, temperatures=(1.0,)).to(device)
    tokens = triton_sampling.sample_tokens(*case._replace(top_k=torch.zeros_like(case.top_k)))
    assert torch.equal(tokens, case.logits.argmax(-1))


# Nearly equal weights, all in the range that is left after the first passes.
HOT = {"scale": 0.1, "temperatures": (100.0,), "top_ks": (1, 2, 5, 50, OFF), "top_ps": (1e-6, 0.1, 1.0)}
# No other filter, and a chunk that is banned whole.
SIGMAS = {
    "temperatures": (0.7, 1.0, 3.0),
    "top_ks": (OFF,),
    "top_ps": (1.0,),
    "min_ps": (0.0,),
    "top_n_sigmas": (0.5, 2.0),
}
# Where the list is too short: both filters over all tokens, and passes over weights that many tokens share.
SEARCHES = {
    "top-k": {"top_ks": (300, 3000), "top_ps": (1.0,)},
    "top-p": {"top_ks": (OFF,), "top_ps": (0.3, 0.9, 0.999)},
    "both": {"top_ks": (300, 3000), "top_ps": (0.3, 0.9, 0.999)},
}
FULL = ("1500-float32", "1500-bfloat16")  # of the grid; elsewhere the parts that differ
PARTS = ("1-float32-equal", "7-float32-normal-2.0", "7-float32-few-values", "257-float32-banned", "1500-float16-peaked")
INTERPRETED = {
    "top-n-sigma": functools.partial(of_the_grid, vocabulary=5000, pattern="banned", rows=4, **SIGMAS),
    "no-number": no_number_gives_no_token,
    "top-k-0": a_top_k_below_1_is_1,
    "noise": noise_has_the_bits_of_the_reference,
}
for name, kwargs in grid((1, 7, 257, 1500)):
    if name.startswith(FULL) or name in PARTS:
        INTERPRETED[name] = functools.partial(of_the_grid, **kwargs, rows=12)
for name, filters in SEARCHES.items():
    for pattern in ("normal", "few-values", "banned"):
        short = {"vocabulary": 3100, "rows": 6, "pattern": pattern, "most_listed": 16, "temperatures": (1.0,)}
        INTERPRETED[f"short-list-{name}-{pattern}"] = functools.partial(of_the_grid, **short, **filters)
for pattern in ("normal", "few-values", "equal"):
    long = functools.partial(of_the_grid, vocabulary=40000, rows=4, pattern=pattern, splits=9)
    INTERPRETED[f"long-{pattern}"] = long
for pattern in ("normal", "few-values"):
    neighbours = functools.partial(programs_and_neighbours_change_nothing, pattern=pattern)
    INTERPRETED[f"programs-{pattern}"] = functools.partial(neighbours, 1100, 4)
    INTERPRETED[f"some-programs-{pattern}"] = functools.partial(neighbours, 600, 3, sizes=((8, 3),))
for vocabulary, dtype in ((1, torch.float32), (7, torch.float16), (600, torch.bfloat16), (600, torch.float32)):
    INTERPRETED[f"extremes-{vocabulary}-{dtype}"] = functools.partial(of_extremes, vocabulary, dtype)
for dtype in DTYPES:
    INTERPRETED[f"hot-{dtype}"] = functools.partial(of_the_grid, vocabulary=300, rows=16, dtype=dtype, **HOT)
    INTERPRETED[f"strided-{dtype}"] = functools.partial(strided_rows_give_the_same, dtype)
    INTERPRETED[f"greedy-{dtype}"] = functools.partial(greedy_tokens_are_the_first_of_the_largest, dtype)


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

KERNELS = ["maxima", *["narrow"] * triton_sampling.LEVELS.value, "gather", "limit", "bounds", "draw"]
# Capability, rows, vocabulary, dtype: aligned rows and others, one program a row and many, one chunk and thousands.
COMPILED = [
    ((8, 0), 1, 151936, torch.bfloat16), ((9, 0), 1, 151936, torch.bfloat16), ((8, 0), 32, 50257, torch.float32),
    ((9, 0), 256, 151936, torch.float32),
    ((9, 0), 4, 2**22, torch.float16),
]  # fmt: skip


@pytest.mark.battery
@pytest.mark.parametrize(("capability", "rows", "vocabulary", "dtype"), COMPILED, ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], rows: int, vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "_num_sms", lambda device: 132)
    columns = (torch.empty_like(column, device="meta") for column in make_case(1, rows=rows)[1:])
    with ahead_of_time.recorded(capability, triton_sampling) as recorded:
        triton_sampling.sample_tokens(*SamplingCase(empty(rows, vocabulary, dtype=dtype), *columns))
    assert [kernel.__name__ for kernel, _, _ in recorded] == [f"{name}_kernel" for name in KERNELS]
    for launch in {id(launch[0]): launch for launch in recorded}.values():
        binary, _ = ahead_of_time.without_spills(launch, capability, programs=2)
        assert binary.metadata.shared <= 48 * 1024, launch[0].__name__


@pytest.mark.parametrize("capability", [pytest.param((8, 0), marks=pytest.mark.battery), (9, 0)], ids=str)
def test_greedy_tokens_compile_without_spills(capability: tuple[int, int]) -> None:
    with ahead_of_time.recorded(capability, triton_greedy) as recorded:
        triton_greedy.greedy_tokens(empty(8, 151936))
    assert len(recorded) == 2
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability)


# ---- refused --------------------------------------------------------------------------------------------------------


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "maxima_kernel", None)
    assert triton_sampling.sample_tokens(*make_case(5, rows=0)).shape == (0,)


def test_refuses_wrong_inputs() -> None:
    case = make_case(300, rows=4)
    wrong = [
        ({"logits": case.logits[0]}, r"logits must be \[R, V\].*got \[300\]"),
        ({"logits": case.logits[:, :0]}, r"logits must be \[R, V\]"),
        ({"logits": case.logits.T.contiguous().T}, "last stride 1, got .* with strides"),
        ({"logits": case.logits.double()}, "logits must be float32, bfloat16 or float16, got torch.float64"),
        ({"temperature": case.temperature.double()}, r"temperature must be a contiguous \[4\] of torch.float32"),
        ({"temperature": case.temperature[:3]}, r"temperature must be .*got \[3\]"),
        ({"top_k": case.top_k.long()}, "top_k must be .*got .*int64"),
        ({"top_p": torch.ones(8)[::2]}, "top_p must be a contiguous"),
        ({"min_p": case.min_p.to("meta")}, "min_p must be .* on cpu, got .* on meta"),
        ({"top_n_sigma": case.top_n_sigma[1:]}, r"top_n_sigma must be .*got \[3\]"),
        ({"seed": case.seed.int()}, "seed must be .*int64.*got .*int32"),
        ({"position": case.position[1:]}, r"position must be .*got \[3\]"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            triton_sampling.sample_tokens(*case._replace(**change))


def test_greedy_tokens_refuse_wrong_inputs() -> None:
    logits = torch.ones(4, 8)
    for given, message in (
        ((logits[0], torch.zeros(4).long()), r"logits must be \[R, V\].*got \[8\]"),
        ((logits.double(), torch.zeros(4).long()), "logits must be float32, bfloat16 or float16, got torch.float64"),
        ((logits, torch.zeros(3).long()), r"last_tokens must be a contiguous \[4\] or longer of int64.*got \[3\]"),
        ((logits, torch.zeros(4).int()), "last_tokens must be .*got .*int32"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_greedy.keep_greedy_tokens(*given)


ORDINARY = [
    "257-float32-banned", "top-k-0", "short-list-both-few-values", "greedy-torch.float16", "no-number", "top-n-sigma",
    "some-programs-few-values", "noise",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
