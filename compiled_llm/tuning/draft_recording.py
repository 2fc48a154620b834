"""What a model does for drafts of outputs that are known: an engine serves them again, and each step is looked at.

A token that a network drafts follows from the tokens before it, the request's seed and its parameters alone; so does
what the model samples behind a wrong draft. So both are the same whenever they are asked for, and ``draft_replay.py``
serves with any number of requests and drafts what was seen here once. The tokens of an output are put in the place of
those that the model samples, and it is counted how often these are the same.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.speculative_config import NETWORK_METHODS, SpeculativeConfig
from compiled_llm.checkpoint.draft_model import draft_checkpoint
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer, model_config
from compiled_llm.drafting.methods import host_source
from compiled_llm.engine.core import make_scheduler
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.models.registry import with_stream
from compiled_llm.ops.user_warnings import warn
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.scheduling.worker_drafts import WorkerDrafts
from compiled_llm.tuning.draft_replay import (
    NO_DRAFT,
    KnownDrafts,
    KnownRequest,
    Served,
    WrongDrafts,
    known_tokens,
    wrong_drafts,
)

# Of each output and of each prompt, for seconds of drafting: steps are measured behind as many tokens at the start.
_MEASURED_TOKENS, _MEASURED_PROMPT = 32, 128
_LEFT_OUT = 4  # steps, the first ones


def check_networks(config: EngineConfig, configs: Sequence[Mapping[str, Any]]) -> None:
    """See that the networks of ``configs`` are there and fit the model, without starting an engine.

    Args:
        config: of the model.

    Raises:
        ValueError: one cannot draft for this model.
    """
    directory = checkpoint_directory(config, with_weights=False)
    target = with_stream(model_config(directory, config.model_impl, config.dtype), config.stream)
    tokenizer = load_tokenizer(config, directory)
    for one in configs:
        if one["method"] in NETWORK_METHODS:
            own = dataclasses.replace(config, speculative_config=dict(one))
            draft_checkpoint(own, target, tokenizer, with_weights=False)


def of_networks(
    start: Callable[[Mapping[str, Any]], CompiledEngine | None],
    requests: Sequence[KnownRequest],
    configs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
) -> Iterator[tuple[int, KnownDrafts | None]]:
    """What networks draft for ``requests``, one after the other, by the places of those of ``configs`` that have one.

    Each of these has an engine of its own, which starts once: what drafting takes depends on the number of drafts.
    Fewer drafts of a chain are the first of more, so the most alone are recorded. What was recorded takes memory, some
    KB for each token of a trace: no more than that of one method is kept.

    Args:
        start: makes an engine for a value of ``speculative_config``; None: it cannot, and so there are no drafts.
        sizes: of decode buckets of these engines.

    Raises:
        ValueError: as ``record`` and ``with_seconds``.
    """
    longest: tuple[str, KnownDrafts] | None = None  # of the chains of a method
    places = [place for place, config in enumerate(configs) if config["method"] in NETWORK_METHODS]

    def order(place: int) -> tuple[Any, ...]:
        config = configs[place]
        return config["method"], "speculative_token_tree" in config, -config["num_speculative_tokens"]

    for place in sorted(places, key=order):
        config = SpeculativeConfig.of(configs[place])
        if longest is not None and (config.has_trees or longest[0] != config.method):
            longest = None
        engine = start(configs[place])
        if engine is None:
            yield place, None
            continue
        with engine:
            known = record(engine, config, requests) if longest is None else longest[1]
            known = with_seconds(known, engine, config, requests, sizes)
        if not config.has_trees:
            longest = config.method, known
        yield place, known
        del known


def of_lookahead(
    engine: CompiledEngine, requests: Sequence[KnownRequest], configs: Sequence[Mapping[str, Any]]
) -> dict[int, KnownDrafts]:
    """What the model samples behind the drafts of "lookahead", by the places of those of ``configs`` of that method.

    A step that drafts less than others leaves other guesses: so what was seen with any of them counts for all.

    Args:
        engine: with as many drafts as the most of ``configs``.
    """
    places = [place for place, config in enumerate(configs) if config["method"] == "lookahead"]
    found = {place: record(engine, SpeculativeConfig.of(configs[place]), requests) for place in places}
    samples = dict[WrongDrafts, int]()
    for known in found.values():
        samples |= known.samples
    return {place: dataclasses.replace(known, samples=samples) for place, known in found.items()}


def record(engine: CompiledEngine, config: SpeculativeConfig, requests: Sequence[KnownRequest]) -> KnownDrafts:
    """Serve ``requests`` again, as many at once as ``engine`` has room for, and see what its model does for drafts.

    By a network: what it drafts behind each token. By "lookahead": what the model samples behind all drafts.

    Args:
        engine: in this process, of ``config``; for "lookahead" any with as many drafts. It must have served all that
            was asked of it, and must not serve afterwards: blocks of its KV cache have other contents.

    Raises:
        ValueError: the engine has its model in other processes, or no room for a request.
    """
    recording = _Recording(engine)
    if config.method in NETWORK_METHODS:
        recording.serve(_Unverified(config), requests)
    else:
        all_drafts = dataclasses.replace(config, adaptive=False)
        recording.serve(host_source(all_drafts, engine.model_config.vocab_size), requests)
    return KnownDrafts(
        recording.drafts, recording.samples, num_tokens=recording.num_tokens, num_again=recording.num_again
    )


def with_seconds(
    known: KnownDrafts,
    engine: CompiledEngine,
    config: SpeculativeConfig,
    requests: Sequence[KnownRequest],
    sizes: Sequence[int],
) -> KnownDrafts:
    """``known`` with what drafting takes for so many ``requests`` at once.

    The longest outputs are served, the first tokens of each behind the last ones of its prompt. A warning says which of
    ``sizes`` were not seen.

    Args:
        engine: as in ``record``, with decode buckets of these ``sizes``.

    Raises:
        ValueError: no output has two tokens.
    """
    seconds, read_seconds, num_read = dict[int, float](), 0.0, 0
    longest = sorted(requests, key=lambda one: -len(one.output_token_ids))
    short = [
        dataclasses.replace(
            one,
            prompt_token_ids=one.prompt_token_ids[-_MEASURED_PROMPT:],
            output_token_ids=one.output_token_ids[:_MEASURED_TOKENS],
        )
        for one in longest
    ]
    for size in sizes:
        recording = _Recording(engine)
        recording.serve(_Unverified(config), short[:size], exchanges=False)  # which would take time on a GPU
        if found := recording.seconds.get(size):
            seconds[size] = statistics.median(found[_LEFT_OUT:] or found)
            read_seconds += max(0.0, recording.read_seconds - recording.num_reading * seconds[size])
            num_read += recording.num_read
    if not seconds:
        raise ValueError("the outputs of a trace must have more than one token: there is no step to draft for")
    if missing := [str(size) for size in sizes if size not in seconds]:
        warn(
            f"drafting by {config.method!r} was not measured for {', '.join(missing)} requests at once, as there were "
            f"never so many behind their prompts: it is taken to last as for {', '.join(map(str, seconds))}. Longer "
            "outputs or a larger KV cache would help"
        )
    return dataclasses.replace(known, seconds=seconds, reading_seconds=read_seconds / max(1, num_read))


class _Unverified(WorkerDrafts):
    """A network drafts behind each step, and nothing of it is verified: so it is asked behind each token."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config.num_tokens, adapts=False, reads_tokens=config.reads_tokens)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        return [()] * len(requests)


class _Recording:
    """Requests that are served again, and what was seen of them.

    Attributes:
        drafts, samples, num_tokens, num_again: as in ``KnownDrafts``.
        seconds: of drafting, behind each step without prompts, by the number of its requests.
        read_seconds, num_reading, num_read: of drafting behind steps with prompts, how many these were, and tokens of
            prompts in them.
    """

    def __init__(self, engine: CompiledEngine) -> None:
        self._engine, self._runner = engine, engine.own_runner
        self.drafts: dict[tuple[int, int], tuple[int, ...]] = {}
        self.samples: dict[WrongDrafts, int] = {}
        self.num_tokens = self.num_again = 0
        self.seconds: dict[int, list[float]] = {}
        self.read_seconds, self.num_reading, self.num_read = 0.0, 0, 0

    def serve(self, source: DraftSource, requests: Sequence[KnownRequest], *, exchanges: bool = True) -> None:
        """``exchanges``: whether a network reads the known tokens, where the model has sampled others."""
        scheduler = make_scheduler(self._engine.config, self._runner.facts, source)
        most, served = scheduler.request_capacity, dict[RequestId, Served]()
        for number, known in enumerate(requests):
            if known.num_tokens > most:
                raise ValueError(
                    f"a request of the trace has {known.num_tokens} tokens with its output, and max_model_len and the "
                    f"KV cache leave {most}: raise these, or leave it out of the trace"
                )
            one = Served(known, number, most)
            served[one.request.request_id] = one
            scheduler.add(one.request)
        try:
            while scheduler.has_unfinished_requests():
                output = scheduler.schedule()
                running = [served[name] for name in output.request_ids]
                tokens = known_tokens(output, running)
                self._runner.exchange = _put(tokens) if exchanges else None
                result = self._runner.collect(self._runner.launch(output))
                scheduler.update(output, self._entered(output, running, tokens, result))
                self._see(output, running, result)
                for one in running:
                    one.end(scheduler)
        finally:
            self._runner.exchange = None

    def _entered(
        self, output: SchedulerOutput, running: Sequence[Served], tokens: Sequence[int], result: StepResult
    ) -> StepResult:
        """``result`` with the known tokens, but for what the model sampled behind wrong drafts."""
        found, behind = list(tokens), dict(wrong_drafts(output, running))
        for row, where in behind.items():
            found[row] = self.samples[where] = result.sampled_token_ids[row]
        # A request whose tokens are computed anew, in parts, has a row that samples nothing.
        rows = zip(output.first_rows(), output.num_samples, strict=True)
        for row in (row for first, count in rows for row in range(first, first + count)):
            if row not in behind and tokens[row] != NO_DRAFT:
                self.num_tokens += 1
                self.num_again += result.sampled_token_ids[row] == tokens[row]
        return dataclasses.replace(result, sampled_token_ids=tuple(found))

    def _see(self, output: SchedulerOutput, running: Sequence[Served], result: StepResult) -> None:
        """A step has been entered."""
        if result.draft_token_ids is not None:
            for one, drafts in zip(running, result.draft_token_ids, strict=True):
                if drafts:
                    self.drafts[one.number, one.num_known] = drafts
        num_read = output.num_tokens - sum(output.num_samples)
        if num_read:
            self.read_seconds += result.draft_seconds
            self.num_reading += bool(result.draft_seconds)
            self.num_read += num_read
        elif result.draft_seconds:
            self.seconds.setdefault(len(running), []).append(result.draft_seconds)


def _put(tokens: Sequence[int]) -> Callable[[SchedulerOutput, Tensor], None]:
    ids = torch.tensor([0 if token == NO_DRAFT else token for token in tokens])

    def exchange(output: SchedulerOutput, last_tokens: Tensor) -> None:
        last_tokens[: len(ids)] = ids.to(last_tokens.device)

    return exchange
