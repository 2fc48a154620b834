"""Cases for the sampling kernels, shared by the tests of every device, and the check that judges their tokens.

A case is one call of the op. Its rows have all sorts of parameters side by side, so that every call mixes them.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops.sampling.noise import HALVING, token_noise
from compiled_llm.ops.sampling.reference import MIN_TEMPERATURE, NO_TOKEN, sample_tokens_reference, standard_deviations

OFF = 2**31 - 1  # a top_k
TEMPERATURES = (0.0, 1e-30, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0)
TOP_KS = (1, 2, 5, 50, 1000, 7777, OFF, OFF, OFF)
TOP_PS = (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0)
MIN_PS = (0.0, 0.0, 0.0, 0.01, 0.1, 1.0)
TOP_N_SIGMAS = (0.0, 0.0, 0.0, 0.0, 0.3, 1.0, 3.0, 100.0)
SEEDS = (0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63))
POSITIONS = (0, 1, 2**31 - 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SamplingCase(NamedTuple):
    """The arguments of one call, in the op's order."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    top_n_sigma: Tensor
    seed: Tensor
    position: Tensor

    def rows(self, index: slice | Tensor) -> "SamplingCase":
        return SamplingCase(*(column[index] for column in self))

    def to(self, device: str) -> "SamplingCase":
        return SamplingCase(*(column.to(device) for column in self))


def _normal(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, vocabulary, generator=generator)


def _falling(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.linspace(3, -3, vocabulary).repeat(rows, 1)


def _peaked(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """A few tokens have nearly all the weight, as in a language model's usual step."""
    logits = torch.randn(rows, vocabulary, generator=generator)
    places = torch.randint(vocabulary, (rows, 5), generator=generator)
    return logits.scatter_add(1, places, 4 + 4 * torch.rand(rows, 5, generator=generator))


def _banned(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    logits = torch.randn(rows, vocabulary, generator=generator)
    return logits.masked_fill(torch.rand(rows, vocabulary, generator=generator) < 0.7, -torch.inf)


def _few_values(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, vocabulary, generator=generator).mul(2).round() / 2


def _equal(rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.full((rows, vocabulary), 0.7)


PATTERNS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "falling": _falling,
    "peaked": _peaked,
    "banned": _banned,
    "few-values": _few_values,
    "equal": _equal,
}


def make_case(
    vocabulary: int,
    *,
    pattern: str = "normal",
    scale: float = 2.0,
    dtype: torch.dtype = torch.float32,
    rows: int = 24,
    temperatures: tuple[float, ...] = TEMPERATURES,
    top_ks: tuple[int, ...] = TOP_KS,
    top_ps: tuple[float, ...] = TOP_PS,
    min_ps: tuple[float, ...] = MIN_PS,
    top_n_sigmas: tuple[float, ...] = TOP_N_SIGMAS,
    seed: int = 0,
) -> SamplingCase:
    """A random call: each row draws its parameters from the tuples. Everything is drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def choice(values: tuple, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=generator)]

    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(2**31 - 1, (rows,), generator=generator, dtype=torch.int32)
    extreme = torch.rand(rows, generator=generator) < 0.2
    return SamplingCase(
        logits=(PATTERNS[pattern](rows, vocabulary, generator) * scale).to(dtype),
        temperature=choice(temperatures),
        top_k=choice(tuple(min(k, vocabulary + 1) if k != OFF else k for k in top_ks), torch.int32),
        top_p=choice(top_ps),
        min_p=choice(min_ps),
        top_n_sigma=choice(top_n_sigmas),
        seed=torch.where(extreme, choice(SEEDS, torch.int64), seeds),
        position=torch.where(extreme, choice(POSITIONS, torch.int32), positions),
    )


def extreme_case(vocabulary: int, dtype: torch.dtype) -> SamplingCase:
    """Rows without a number, with infinities, with what is no number, and with the largest numbers of the dtype."""
    nan, inf, largest = math.nan, math.inf, torch.finfo(dtype).max
    special: list[dict[int, float]] = [
        {},
        {0: nan},
        {vocabulary // 2: nan, vocabulary - 1: nan},
        {vocabulary - 1: inf},
        {vocabulary // 3: inf, vocabulary - 1: inf},
        {0: nan, vocabulary // 2: inf},
        {0: largest, vocabulary - 1: largest},
        {0: -largest, vocabulary - 1: largest},
        {0: 1e4, vocabulary // 2: 1e4, vocabulary - 1: -inf},
    ]
    logits = make_case(vocabulary, rows=3 * len(special) + 5, dtype=dtype).logits
    for row, values in enumerate(special * 3):
        if row >= 2 * len(special):
            logits[row] = -inf
        for token, value in values.items():
            logits[row, token] = value
    logits[-5] = -inf
    logits[-4] = nan
    logits[-3] = inf
    logits[-2] = -largest
    logits[-1] = torch.tensor([0.0, -0.0], dtype=dtype).repeat(vocabulary)[:vocabulary]
    params = make_case(1, rows=len(logits), seed=1)
    return params._replace(logits=logits)


def grid(vocabularies: tuple[int, ...]) -> Iterator[tuple[str, dict]]:
    """Names and ``make_case`` arguments: every pattern, the normal one at several scales."""
    for vocabulary in vocabularies:
        for dtype in DTYPES:
            name = f"{vocabulary}-{str(dtype).removeprefix('torch.')}"
            for scale in (0.1, 2.0, 10.0, 30.0):
                yield f"{name}-normal-{scale}", {"vocabulary": vocabulary, "dtype": dtype, "scale": scale}
            for pattern in PATTERNS:
                if pattern != "normal":
                    yield f"{name}-{pattern}", {"vocabulary": vocabulary, "dtype": dtype, "pattern": pattern}


# ---- what a token may be --------------------------------------------------------------------------------------------


def acceptable(
    token: int,
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    top_n_sigma: float,
    seed: int,
    position: int,
    tolerance: float = 1e-6,
) -> bool:
    """Whether a row's token is right up to rounding, in float64.

    Some set of tokens that the filters may keep must give it: one whose least weight lies within rounding of what each
    filter asks for, top-p's share within ``tolerance`` of ``top_p``, and no other token of the set has a larger sum of
    noise and log-weight, by more than 200 units of noise. The weights of a float32 are off by
    ``tolerance`` and as much for each unit of their exponent.
    """
    logits = logits.double()
    largest = logits.max()
    if not largest.isfinite() or token == NO_TOKEN:
        return token == NO_TOKEN and not largest.isfinite()
    if temperature <= 0:
        return token == int(logits.argmax())  # the first of equals
    weights = ((logits - largest) / max(temperature, MIN_TEMPERATURE)).exp()
    falling = weights.sort(descending=True).values

    def slightly_less(weight: float) -> float:
        return weight * (1 - tolerance * (1 - math.log(max(weight, 1e-300))))

    # The least weight that stays, at the lowest and at the highest.
    reach = top_n_sigma * float(standard_deviations(logits[None])) if top_n_sigma > 0 else math.inf
    limit = max(min_p, math.exp(-reach / max(temperature, MIN_TEMPERATURE)))
    lowest, highest = slightly_less(limit), min(2 * limit - slightly_less(limit), 1.0)
    kth = float(falling[min(top_k, len(falling)) - 1])
    lowest, highest = max(lowest, slightly_less(kth)), max(highest, kth)
    if top_p < 1:
        nucleus = []
        for least, share in ((slightly_less(kth), top_p + tolerance), (kth, top_p - tolerance)):
            mass = torch.where(falling >= least, falling, 0.0).cumsum(0)
            place = int((mass < min(share, 1 - 1e-12) * mass[-1]).sum())
            nucleus.append(float(falling[place]))
        lowest, highest = max(lowest, slightly_less(nucleus[0])), max(highest, nucleus[1])
    least_weights = {lowest, highest, *weights[(weights >= lowest) & (weights <= highest)].tolist()}
    noise = token_noise(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32), torch.arange(len(logits)))
    sums = weights.log2() + noise.double() / HALVING
    for least in least_weights:
        best = sums[weights >= max(least, 1e-300)].max()
        if weights[token] >= max(least, 1e-300) and sums[token] >= best - 200 / HALVING:
            return True
    return False


def expected(case: SamplingCase) -> Tensor:
    """The reference's tokens."""
    return sample_tokens_reference(*case)


def check(
    case: SamplingCase, op: Callable[..., Tensor], most_differences: int = 0, wanted: Tensor | None = None
) -> Tensor:
    """The op's tokens, after comparing them with the reference's, or ``wanted``, which are those.

    Where one differs it must be right up to rounding, and no more than ``most_differences`` may.
    """
    tokens = op(*case)
    assert tokens.shape == case.logits.shape[:1]
    assert tokens.dtype == torch.int64
    wanted = expected(case) if wanted is None else wanted
    different = (tokens != wanted).nonzero().flatten().tolist()
    for row in different:
        token, params = int(tokens[row]), [column[row].item() for column in case[1:]]
        assert NO_TOKEN <= token < case.logits.shape[1], f"row {row}: {token}"
        assert acceptable(token, case.logits[row].cpu(), *params), (
            f"row {row}: {token} for {int(wanted[row])}; "
            + ", ".join(f"{name} {value}" for name, value in zip(case._fields[1:], params, strict=True))
        )
    assert len(different) <= most_differences, f"rows {different} differ, if only by rounding"
    return tokens


def probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, top_n_sigma: float
) -> Tensor:
    """The exact distribution of one row, ``[V]`` float64, token by token from the definition."""
    weights = ((logits.double() - logits.max()) / temperature).exp()
    falling = sorted(weights.tolist(), reverse=True)
    falling = [weight for weight in falling if weight >= falling[min(top_k, len(falling)) - 1]]
    least, mass = falling[-1], 0.0
    if top_p < 1:
        for least in falling:
            mass += least
            if mass >= top_p * sum(falling):
                break
    weights[(weights < least) | (weights < min_p)] = 0
    if top_n_sigma > 0:
        allowed = logits[logits > -math.inf].double()
        weights[logits.double() < allowed.max() - top_n_sigma * allowed.std(correction=0)] = 0
    return weights / weights.sum()


def chi_square_is_likely(counts: Tensor, probabilities: Tensor) -> bool:
    """Whether such counts, ``[V]``, come from these probabilities with p > 0.001; none where a probability is 0."""
    if counts[probabilities == 0].any():
        return False
    wanted = probabilities.double() * counts.sum()
    usual = wanted > 5
    chi_square = float(((counts - wanted)[usual] ** 2 / wanted[usual]).sum())
    freedom = int(usual.sum()) - 1
    # Wilson and Hilferty's approximation of the 0.999 quantile.
    return chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
