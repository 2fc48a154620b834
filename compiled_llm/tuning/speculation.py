"""Which method of drafting suits the work of earlier runs: their outputs are replayed with each, on the host alone.

What networks draft, and what a model samples behind wrong drafts, has been seen before (``draft_recording.py``).
Acceptance comes from replays that take all drafts (``adaptive`` off), of one request at a time. The expected tokens a
second come from replays with ``adaptive``, as engines have it, of so many requests at once: the tokens of steps without
prompts, over the seconds that such steps were measured to take and those that looking for drafts took in the replay.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from compiled_llm.api import tables
from compiled_llm.api.readable import shown
from compiled_llm.api.speculative_config import METHODS, NETWORK_METHODS, SpeculativeConfig
from compiled_llm.offline.formats import row_of_object
from compiled_llm.offline.rows import Row
from compiled_llm.tuning import buckets
from compiled_llm.tuning.draft_replay import KnownDrafts, KnownRequest, Replay, StepSeconds, limits_for, replay

LEAST_GAIN = 1.02  # over no drafts, that is worth a setting
LEAST_AGAIN = 0.98  # of the tokens: others come of kernels that round in another way
_NOT_AGAIN = (
    "So they were sampled with other parameters or seeds, behind prompts that were cut or encoded in another way, with "
    "some tokens forbidden, or by an adapter. What a model would have drafted then is not known: its drafts are right "
    "far less often here than they would be. Give the flags and the seed of that run (results do not say what "
    "parameters a row had of its own); or --serve-again, and the model answers the prompts anew"
)
_NOT_AGAIN_HERE = (
    "The model gave these outputs in this run. So it rounds in another way where other requests are beside them, or "
    "penalties counted other tokens, and its drafts are right less often here than they would be"
)


# -- The trace


class TraceLine(NamedTuple):
    """A request of a trace.

    Attributes:
        name: what messages call it.
        prompt: text or token ids; None where ``row`` is to be served first.
        outputs: of each continuation the token ids, and whether it ended by its length.
        row: a request without an output.
        number: of its row in the run that served it.
    """

    name: str
    prompt: str | list[int] | None
    outputs: tuple[tuple[list[int], bool], ...]
    row: Row | None = None
    number: int = 0


def read_trace(paths: Sequence[Path]) -> list[TraceLine]:
    """The requests of files in JSON Lines: results of ``compiled-llm batch``, or rows as it takes them.

    Results of rows that failed are left out.

    Raises:
        ValueError: a line is neither; there is none with a request.
        OSError: a file cannot be read.
    """
    lines: list[TraceLine] = []
    for path in paths:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            name = f"{path}, line {number}"
            if text.strip():
                lines += _lines_of(name, len(lines), text)
    if not lines:
        raise ValueError(f"{', '.join(map(str, paths))} holds no request")
    return lines


def _lines_of(name: str, index: int, text: bytes) -> list[TraceLine]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name}: must be a JSON object, given {shown(values)}")
    if "response" in values:
        raise ValueError(f"{name}: is a result in OpenAI's format, which has no prompt: give the rows that it answers")
    if "error" in values:
        return []
    if "token_ids" not in values and "text" not in values:
        row = row_of_object(index, name, values)
        if row.error is not None:
            raise ValueError(f"{name}: {row.error}")
        return [TraceLine(name, None, (), row, index)]
    prompt = values.get("prompt_token_ids") or values.get("prompt")
    if not (isinstance(prompt, str) and prompt) and not _are_ids(prompt):
        raise ValueError(f"{name}: must have prompt or prompt_token_ids beside its output, given {shown(prompt)}")
    completions = values.get("outputs", [values])
    if not isinstance(completions, list) or not all(isinstance(one, dict) for one in completions):
        raise ValueError(f"{name}: outputs must be a list of objects, given {shown(completions)}")
    outputs = []
    for one in completions:
        token_ids = one.get("token_ids")
        if token_ids != [] and not _are_ids(token_ids):
            raise ValueError(f"{name}: token_ids must be a list of token ids, given {shown(token_ids)}")
        if token_ids:
            outputs.append((token_ids, one.get("finish_reason", "length") == "length"))
    place = values.get("index")
    if type(place) is not int or place < 0:
        place = index
    return [TraceLine(name, prompt, tuple(outputs), number=place)] if outputs else []


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(item) is int and 0 <= item < 2**31 - 1 for item in value)
    )


def to_be_served(
    lines: Sequence[TraceLine], most_tokens: int | None = None, *, greedy: bool = False
) -> list[TraceLine]:
    """``lines`` without their outputs: rows that ask for as many, each at most as long as the longest of its line.

    Args:
        most_tokens: of an output; None: any number.
        greedy: one output of each alone: others would be the same.
    """
    made = []
    for place, line in enumerate(lines):
        if line.prompt is None:
            made.append(line)
            continue
        longest = max(len(tokens) for tokens, _ in line.outputs)
        name = "prompt" if isinstance(line.prompt, str) else "prompt_token_ids"
        count = 1 if greedy else len(line.outputs)
        sampling = {"n": count, "max_tokens": min(longest, most_tokens or longest)}
        row = row_of_object(place, line.name, {name: line.prompt, "sampling_params": sampling})
        if row.error is not None:
            raise ValueError(f"{line.name}: {row.error}")
        made.append(TraceLine(line.name, None, (), row))
    return made


# -- Seconds of steps


def step_seconds_of(path: Path, batch_sizes: Sequence[int]) -> tuple[dict[tuple[int, int], float], bool]:
    """Seconds of decode buckets from a file that has ``step_seconds``, and whether one graph served all buckets.

    Raises:
        ValueError: it is no such file, or lacks steps of a batch size without drafts or with room for some.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--step-seconds {path} is not JSON: {error}") from error
    given = values.get("step_seconds") if isinstance(values, dict) else None
    if not isinstance(given, dict):
        raise ValueError(f"--step-seconds {path} must be an object with step_seconds, as --json writes it")
    one_graph = values.get("one_graph", True)
    if not isinstance(one_graph, bool):
        raise ValueError(f"--step-seconds {path}: one_graph must be true or false, given {shown(one_graph)}")
    seconds = {}
    for name, value in given.items():
        found = re.fullmatch(r"decode_([1-9]\d*)(?:x([1-9]\d*))?", name)
        if found is None:
            continue  # of prompts
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"--step-seconds {path}: {name} must be seconds above 0, given {shown(value)}")
        size = int(found[1])
        seconds[size, size * int(found[2] or 1)] = float(value)
    for size in batch_sizes:
        if (size, size) not in seconds or not any(known == size < tokens for known, tokens in seconds):
            raise ValueError(
                f"--step-seconds {path} must have decode_{size}, and decode_{size}x2 or another with room for drafts: "
                "measure them by a run without --step-seconds, or leave the size out of --batch-sizes"
            )
    return seconds, one_graph


def never_falling(seconds: StepSeconds) -> dict[tuple[int, int], float]:
    """Seconds of which those of more tokens are never less: such were slow for another reason, and means are taken."""
    made: dict[tuple[int, int], float] = {}
    for size in dict.fromkeys(size for size, _ in seconds):
        times = {tokens: value for (known, tokens), value in seconds.items() if known == size}
        made |= {(size, n): value for n, value in buckets.never_falling(times, dict.fromkeys(times, 1)).items()}
    return made


def as_names(seconds: StepSeconds) -> dict[str, float]:
    """As ``step_seconds_of`` reads them."""
    return {
        f"decode_{size}" if tokens == size else f"decode_{size}x{tokens // size}": value
        for (size, tokens), value in seconds.items()
    }


# -- What is tried, and what comes of it


def candidates(
    methods: Sequence[str],
    lookups: Sequence[tuple[int, int]],
    counts: Sequence[int] | None = None,
    *,
    trees: bool = False,
    drafters: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Values of ``speculative_config``: each method with each of its ``lookups`` and most drafts.

    Args:
        counts: most drafts; None: those of ``counts_of``.
        trees: each as a chain, and as a tree, if it has them.
        drafters: the ``model`` of methods that need one.
    """
    for method in methods:
        fields = METHODS[method].fields
        own = {"model": drafters[method]} if method in drafters else {}
        chains = counts or counts_of(method)
        shapes = (counts or counts_of(method, tree=True)) if trees and "speculative_token_tree" in fields else ()
        for count in sorted({*chains, *shapes}):
            for least, most in lookups if "prompt_lookup_min" in fields else [(0, 0)]:
                bounds = {"prompt_lookup_min": least, "prompt_lookup_max": most} if most else {}
                config = {"method": method, "num_speculative_tokens": count, **bounds, **own}
                if count in chains:
                    yield config
                if count in shapes:
                    yield {**config, "speculative_token_tree": "auto"}


def counts_of(method: str, *, tree: bool = False) -> Sequence[int]:
    """Most drafts that are tried where none are given. Each of a network is a graph of its own: so there are two."""
    if method not in NETWORK_METHODS:
        return 3, 7, 15
    own = METHODS[method].num_speculative_tokens
    return (7, 15) if tree else ((own + 1) // 2, own)


@dataclasses.dataclass(frozen=True)
class Rating:
    """What a method came to.

    Attributes:
        config: a value of ``speculative_config``.
        all_drafts: the replay that takes all drafts.
        rates: tokens a second, by batch size.
        ratios: of these to the rates without drafts.
        drafts: what a model does for them, without the drafts themselves; None: the method drafts from tokens alone.
    """

    config: Mapping[str, Any]
    all_drafts: Replay
    rates: Mapping[int, float]
    ratios: Mapping[int, float]
    drafts: KnownDrafts | None = None

    @property
    def gain(self) -> float:
        """The geometric mean of the ratios."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))


@dataclasses.dataclass(frozen=True)
class Result:
    """What a trace says.

    Attributes:
        plain: tokens a second without drafts, by batch size.
        ratings: of all candidates.
        again: at which share of the outputs' tokens the model sampled the same again; None: no model was asked.
    """

    num_requests: int
    num_tokens: int
    plain: Mapping[int, float]
    ratings: Sequence[Rating]
    again: float | None = None

    @property
    def best(self) -> Rating | None:
        """With the highest gain; None: none is worth a setting."""
        best = max(self.ratings, key=lambda rating: rating.gain)
        return best if best.gain >= LEAST_GAIN else None


def tune(
    requests: Sequence[KnownRequest],
    configs: Sequence[Mapping[str, Any]],
    batch_sizes: Sequence[int],
    seconds: StepSeconds,
    *,
    one_graph: bool,
    drafts: Iterable[tuple[int, KnownDrafts | None]] = (),
) -> Result:
    """Replay ``requests`` without drafts and with each of ``configs``.

    Args:
        drafts: of those of ``configs`` for which a model drafts, their places and what it does; None: it cannot, and
            that one is left out. Each is replayed as it comes, and not kept.
        batch_sizes: requests at once, rising; at most as many as there are requests.
        seconds: of steps in decode buckets of these sizes.
        one_graph: as in ``EngineLimits.with_drafts``.
    """
    limits = {
        size: limits_for(requests, batch_sizes[: place + 1], one_graph=one_graph)
        for place, size in enumerate(batch_sizes)
    }
    alone = limits_for(requests, [1], one_graph=one_graph)
    plain = {size: replay(requests, limits[size], None, seconds).tokens_per_second for size in batch_sizes}
    if not all(plain.values()):
        raise ValueError("the outputs of a trace must have more than one token: there is no step to draft for")
    ratings, again = dict[int, Rating | None](), list[float]()

    def rate(config: Mapping[str, Any], known: KnownDrafts | None) -> Rating:
        adaptive = SpeculativeConfig.of(config)
        rates = {
            size: replay(requests, limits[size], adaptive, seconds, known).tokens_per_second for size in batch_sizes
        }
        every = replay(requests, alone, SpeculativeConfig.of({**config, "adaptive": False}), None, known)
        ratios = {size: rates[size] / plain[size] for size in batch_sizes}
        kept = None if known is None else dataclasses.replace(known, drafts={}, samples={})
        return Rating(config, every, rates, ratios, kept)

    for place, known in drafts:
        ratings[place] = None if known is None else rate(configs[place], known)
        if known is not None and known.num_tokens:
            again.append(known.num_again / known.num_tokens)
        del known  # before the next one is recorded
    for place, config in enumerate(configs):
        if place not in ratings:
            ratings[place] = rate(config, None)
    rated = [rating for _, rating in sorted(ratings.items()) if rating is not None]
    if not rated:
        raise ValueError("there is nothing to compare: no engine with one of --methods could start")
    num_tokens = sum(len(one.output_token_ids) for one in requests)
    return Result(len(requests), num_tokens, plain, rated, min(again, default=None))


# -- What is printed


def text_of(result: Result, *, all_answered: bool = False) -> str:
    """What a person reads. ``all_answered``: the model gave all outputs in this run."""
    none = {"method": "none", "lookup": "", "tokens": None, "right": "", "a step": 1.0, "us": None}
    rows = [{**none, **_rates(result.plain), "right at 1, 2, 3...": ""}]
    for rating in result.ratings:
        counted, config = rating.all_drafts, rating.config
        us = 1e6 * counted.draft_seconds / max(1, result.num_tokens - counted.num_accepted)
        rows.append(
            {
                "method": config["method"] + (" tree" if "speculative_token_tree" in config else ""),
                "lookup": f"{config['prompt_lookup_min']}-{config['prompt_lookup_max']}"
                if "prompt_lookup_min" in config
                else "",
                "tokens": config["num_speculative_tokens"],
                "right": f"{counted.num_accepted / max(1, counted.num_draft_tokens):.0%}",
                "a step": counted.mean_accepted_length,
                "us": us,
                **_rates(rating.rates, rating.ratios),
                "right at 1, 2, 3...": " ".join(f"{rate:.2f}" for rate in counted.rates_by_position),
            }
        )
    lines = [
        f"{result.num_requests} requests, {result.num_tokens} tokens. Right: of all drafts; a step: tokens of a "
        "request that has drafts; us: to make them; then expected tokens a second by requests at once",
        tables.text_table(rows),
    ]
    if result.again is not None:
        lines.append(f"asked again, the model chose the same token in {result.again:.1%} of all places")
        if result.again < LEAST_AGAIN:
            lines.append(_NOT_AGAIN_HERE if all_answered else _NOT_AGAIN)
    for size in result.plain:
        best = max(result.ratings, key=lambda rating: rating.ratios[size])
        name = _name(best) if best.ratios[size] >= LEAST_GAIN else "no drafts"
        lines.append(f"best at {size}: {name}")
    if result.best is None:
        lines.append(f"no method promises {LEAST_GAIN - 1:.0%} more over all of these: leave speculative_config out")
    else:
        lines.append(f"best over all, {result.best.gain:.2f}x:\n\n{flag_of(result.best.config)}")
    return "\n".join(lines)


def flag_of(config: Mapping[str, Any]) -> str:
    """The flag to paste."""
    return f"--speculative-config '{json.dumps(config)}'"


def as_json(result: Result) -> dict[str, Any]:
    """The result in plain values."""

    def of(rating: Rating) -> dict[str, Any]:
        counted, drafts = rating.all_drafts, rating.drafts
        network = {}
        if drafts is not None and drafts.seconds:
            network = {
                "network_seconds": _by_size(drafts.seconds),
                "network_seconds_a_token_read": drafts.reading_seconds,
            }
        return {
            "speculative_config": dict(rating.config),
            "num_drafts": counted.num_drafts,
            "num_draft_tokens": counted.num_draft_tokens,
            "num_accepted_by_position": list(counted.num_accepted_by_position),
            "mean_accepted_length": counted.mean_accepted_length,
            "draft_seconds": counted.draft_seconds,
            "tokens_per_second": _by_size(rating.rates),
            "ratio": _by_size(rating.ratios),
            **network,
        }

    return {
        "requests": result.num_requests,
        "output_tokens": result.num_tokens,
        "sampled_again": result.again,
        "plain_tokens_per_second": _by_size(result.plain),
        "best": None if result.best is None else dict(result.best.config),
        "candidates": [of(rating) for rating in result.ratings],
    }


def _by_size(rates: Mapping[int, float]) -> dict[str, float]:
    return {str(size): rate for size, rate in rates.items()}


def _rates(rates: Mapping[int, float], ratios: Mapping[int, float] | None = None) -> dict[str, str]:
    return {
        f"at {size}": f"{rate:.1f}" if ratios is None else f"{rate:.1f} ({ratios[size]:.2f}x)"
        for size, rate in rates.items()
    }


def _name(rating: Rating) -> str:
    return json.dumps(rating.config)
