"""How drafts fare on outputs that are known: the scheduler serves them again, beside a worker that looks them up.

The scheduler and the method are those of an engine, so what is drafted, how much of it a step takes and what is
accepted are what an engine of the same limits would have. Only the seconds of a step are looked up, too; and what a
model's part of drafting is, which ``draft_recording.py`` has seen before.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.speculative_config import NETWORK_METHODS, SpeculativeConfig
from compiled_llm.drafting.methods import host_source, network_source
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.decode_costs import DecodeCosts
from compiled_llm.scheduling.draft_trees import tree_depths
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.request import Request, RequestId, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult

StepSeconds = Mapping[tuple[int, int], float]  # of decode buckets, by their requests and tokens
_BLOCK_SIZE = 16
_LEAST_BATCHED_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class KnownRequest:
    """A request and what came of it.

    Attributes:
        ends_by_length: its output ended since it was as long as was allowed: its last token is not drafted. Of others
            it is not known how many tokens were allowed; it is taken for many.
        sampling_params, seed: that its tokens were sampled with, as far as that is known. What a model drafts depends
            on them; what is looked up does not.
    """

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    ends_by_length: bool = True
    sampling_params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


# (number of a request, position of a wrong draft in prompt and output, this draft and those that follow it)
WrongDrafts = tuple[int, int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class KnownDrafts:
    """What a model and a network did where known requests were served with a method: see ``draft_recording.py``.

    Attributes:
        drafts: (number of a request, how many of its tokens are known) -> what the network gives to draft from.
        samples: what the model samples behind wrong drafts.
        seconds: in which the network drafts, by how many requests it drafts for; empty: there is no network.
        reading_seconds: of a token that the network did not compute when the model did, as those of prompts.
        num_tokens, num_again: tokens of outputs, and at how many of them the model sampled the same by itself.
    """

    drafts: Mapping[tuple[int, int], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    samples: Mapping[WrongDrafts, int] = dataclasses.field(default_factory=dict)
    seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    reading_seconds: float = 0.0
    num_tokens: int = 0
    num_again: int = 0

    def drafting_seconds(self, num_requests: int) -> float:
        """On the line between the nearest numbers of requests that were measured."""
        sizes = sorted(self.seconds)
        least, most = sizes[0], sizes[-1]
        num_requests = min(max(num_requests, least), most)
        below = max(size for size in sizes if size <= num_requests)
        above = min(size for size in sizes if size >= num_requests)
        share = (num_requests - below) / (above - below) if above > below else 0.0
        return self.seconds[below] + share * (self.seconds[above] - self.seconds[below])


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay counted.

    Attributes:
        num_drafts, num_draft_tokens, num_accepted_by_position: as in ``EngineStats``.
        num_decode_tokens: tokens that steps without prompts gave; ``decode_seconds`` are those of these steps.
        draft_seconds: that all looking for drafts took here, and a network that drafts, prompts included.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_by_position: tuple[int, ...]
    num_decode_tokens: int
    decode_seconds: float
    draft_seconds: float

    @property
    def num_accepted(self) -> int:
        return sum(self.num_accepted_by_position)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a request with drafts gets from a step; 1 without drafts."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def rates_by_position(self) -> list[float]:
        """For each position of a draft: the share of all drafts that were right so far."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.num_accepted_by_position]

    @property
    def tokens_per_second(self) -> float:
        """Of steps without prompts; looking for drafts counts."""
        seconds = self.decode_seconds + self.draft_seconds
        return self.num_decode_tokens / seconds if seconds else 0.0


def limits_for(requests: Sequence[KnownRequest], sizes: Sequence[int], *, one_graph: bool) -> EngineLimits:
    """Limits without drafts that hold ``requests``, up to ``sizes[-1]`` of them at once.

    Args:
        sizes: of decode buckets, rising.
        one_graph: as in ``EngineLimits.with_drafts``.
    """
    batched = max(_LEAST_BATCHED_TOKENS, 16 * sizes[-1])  # all drafts of all requests
    return EngineLimits(
        max_model_len=max(request.num_tokens for request in requests) + 32,
        max_num_seqs=sizes[-1],
        max_num_batched_tokens=batched,
        block_size=_BLOCK_SIZE,
        decode_bucket_sizes=tuple(sizes),
        token_bucket_sizes=(batched,),
        chunked_prefill=True,
        mixes_lens=one_graph,
    )


def replay(
    requests: Sequence[KnownRequest],
    limits: EngineLimits,
    config: SpeculativeConfig | None = None,
    seconds: StepSeconds | None = None,
    known: KnownDrafts | None = None,
) -> Replay:
    """Serve ``requests`` once more, all there from the start, in their order.

    Args:
        limits: of the engine, without drafts or with any.
        config: how tokens are drafted; None: none are.
        seconds: of steps, of each batch size of ``limits`` some; None: 0, and ``adaptive`` must be off.
        known: what a model drafts for these requests, in their order; None: the method drafts from tokens alone.

    Raises:
        ValueError: a vocabulary is too large for the method; ``seconds`` lack a batch size.
    """
    source: DraftSource | None = None
    if config is not None:
        assert seconds is not None or not config.adaptive
        is_network = config.method in NETWORK_METHODS
        source = network_source(config) if is_network else host_source(config, _vocab_size(requests))
        limits = limits.with_drafts(config.num_tokens, one_graph=limits.mixes_lens, has_trees=config.has_trees)
    buckets = buckets_of(limits)
    clock = _Clock()
    scheduler, expected = _scheduler_of(limits, source, seconds, clock)
    served = {RequestId(str(number)): Served(one, number) for number, one in enumerate(requests)}
    for one in served.values():
        scheduler.add(one.request)
    model = _Model(known or KnownDrafts())
    num_tokens, decode_seconds = 0, 0.0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        bucket = choose_bucket(buckets, output)
        num_requests = len(output.request_ids)
        step_seconds = 0.0
        if expected and bucket.kind == "decode":
            step_seconds = expected.device(num_requests, output.num_tokens - num_requests, samples=False)
        running = [served[name] for name in output.request_ids]
        starts = zip(running, output.num_computed_tokens, strict=True)
        has_prompts = any(start < len(one.request.prompt_token_ids) for one, start in starts)
        before = sum(len(one.request.output_token_ids) for one in running)
        started = clock()
        result = model.result(output, running, bucket, step_seconds)
        clock.ahead += result.seconds - (clock() - started)
        scheduler.update(output, result)
        if scheduler.drafts is not None and output.drafts_next:
            scheduler.drafts.take([one.request for one in running], model.draft(running))
        for one in running:
            one.end(scheduler)
        if not has_prompts:
            decode_seconds += step_seconds
            num_tokens += sum(len(one.request.output_token_ids) for one in running) - before
    counts = scheduler.counts
    return Replay(
        counts.num_drafts,
        counts.num_draft_tokens,
        counts.num_accepted_by_position,
        num_tokens,
        decode_seconds,
        counts.draft_seconds,
    )


class _Clock:
    """The machine's, but steps have taken the seconds that they are expected to."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead


def _scheduler_of(
    limits: EngineLimits, source: DraftSource | None, seconds: StepSeconds | None, clock: _Clock
) -> tuple[Scheduler, DecodeCosts]:
    """A scheduler without requests, and what its steps are expected to take."""
    costs = {
        (bucket.num_requests, bucket.num_tokens): seconds_of(bucket, seconds) if seconds else 0.0
        for bucket in buckets_of(limits)
        if bucket.kind == "decode"
    }
    num_blocks = limits.max_num_seqs * (limits.blocks_per_request + 1)
    # Where one graph serves all sizes, a step computes its own. What such a step takes follows from all that is known,
    # with drafts and without.
    pads = not limits.mixes_lens
    measured = tuple((costs if pads else {**seconds, **costs}).items()) if seconds else ()
    expected = DecodeCosts(measured, pads=pads)
    pool, step_costs = BlockPool(num_blocks), StepCosts(pads=pads)
    scheduler = Scheduler(limits, pool, drafter=source, decode_seconds=measured, costs=step_costs, clock=clock)
    return scheduler, expected


def seconds_of(bucket: Bucket, seconds: StepSeconds) -> float:
    """Of a step in a decode bucket: as measured, or on the line between the nearest sizes of its batch size.

    Raises:
        ValueError: ``seconds`` have no such batch size, or none without drafts.
    """
    known = sorted((tokens, value) for (size, tokens), value in seconds.items() if size == bucket.num_requests)
    if not known or known[0][0] > bucket.num_tokens:
        raise ValueError(f"step_seconds must have decode_{bucket.num_requests}, given none")
    below = [pair for pair in known if pair[0] <= bucket.num_tokens][-1]
    above = next((pair for pair in known if pair[0] >= bucket.num_tokens), None)
    if above is None:  # in proportion, as an engine takes what it did not run
        return below[1] * bucket.num_tokens / below[0]
    if above == below:
        return below[1]
    return below[1] + (above[1] - below[1]) * (bucket.num_tokens - below[0]) / (above[0] - below[0])


class Served:
    """A request of the scheduler, and its output as it is known.

    Args:
        most_tokens: that a request may have in all; None: as many as it likes.
    """

    def __init__(self, known: KnownRequest, number: int, most_tokens: int | None = None) -> None:
        prompt, output = list(known.prompt_token_ids), list(known.output_token_ids)
        self.number, self.output = number, output
        # A stop token ends it within a step, as in an engine, unless it was among the tokens before.
        stops = not known.ends_by_length and Counter(output)[output[-1]] == 1
        room = 0 if known.ends_by_length else 16
        if most_tokens is not None:
            room = min(room, most_tokens - known.num_tokens)
        self.request = Request(
            request_id=RequestId(str(number)),
            prompt_token_ids=prompt,
            sampling_params=_params_of(known.sampling_params, len(output) + room),
            seed=known.seed,
            stop_token_ids=frozenset(output[-1:] if stops else ()),
            max_num_tokens=len(prompt) + len(output) + room,
            arrival_time=0.0,
        )

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output that the host knows."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    def tokens(self, first_position: int, count: int) -> list[int]:
        """What is sampled at so many positions of prompt and output; past the end what no draft is equal to."""
        start = first_position - len(self.request.prompt_token_ids)
        tokens = self.output[start : start + count] if start >= 0 else []
        return [*tokens, *[NO_DRAFT] * (count - len(tokens))]

    def end(self, scheduler: Scheduler) -> None:
        """End the request where its output ended for a reason that the scheduler does not know."""
        if self.request.status is Status.FINISHED or len(self.request.output_token_ids) < len(self.output):
            return
        scheduler.drop_output(self.request, len(self.output))
        scheduler.end(self.request, "stop")


NO_DRAFT = 2**31 - 1  # no token


# What says how a token is chosen, and nothing of when an output ends or what is told of it.
_OF_CHOICE = (
    *("temperature", "top_p", "top_k", "min_p", "top_n_sigma"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logits_transforms"),
)


def _params_of(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{name: getattr(params, name) for name in _OF_CHOICE})


class _Model:
    """Gives the results of steps: tokens are known, and as far as ``known`` has it, what a model does besides."""

    def __init__(self, known: KnownDrafts) -> None:
        self._known = known
        self._num_read: dict[int, int] = {}  # of each request, the tokens that a network has computed
        self._prompts_read: set[tuple[int, ...]] = set()

    def result(self, output: SchedulerOutput, running: Sequence[Served], bucket: Bucket, seconds: float) -> StepResult:
        """Of a step that takes so many ``seconds`` without a network that drafts behind it.

        That has no drafts in it: ``draft`` gives them, once the step is entered. Behind a wrong draft the token is what
        the model samples there; -1: that is not known.
        """
        sampled = list(known_tokens(output, running))
        for row, where in wrong_drafts(output, running):
            sampled[row] = self._known.samples.get(where, -1)
        if not output.drafts_next:
            return StepResult(bucket, tuple(sampled), seconds=seconds)
        drafted = [one for one, count in zip(running, output.num_samples, strict=True) if count]
        num_lacking = sum(map(self._num_lacking, drafted))
        drafting = self._known.drafting_seconds(len(drafted)) if drafted else 0.0
        drafting += num_lacking * self._known.reading_seconds
        return StepResult(
            bucket,
            tuple(sampled),
            seconds=seconds + drafting,
            draft_token_ids=((),) * len(running),
            draft_seconds=drafting,
        )

    def _num_lacking(self, one: Served) -> int:
        """Tokens that a network has to read behind this step. Requests of one prompt share its blocks."""
        num_read = self._num_read.get(one.number)
        if num_read is None:
            prompt = tuple(one.request.prompt_token_ids)
            num_read = len(prompt) if prompt in self._prompts_read else 0
            self._prompts_read.add(prompt)
        return one.num_known - num_read

    def draft(self, running: Sequence[Served]) -> list[tuple[int, ...]]:
        """What a network gives behind a step that has been entered."""
        self._num_read |= {one.number: one.num_known for one in running if one.request.output_token_ids}
        return [self._known.drafts.get((one.number, one.num_known), ()) for one in running]


def wrong_drafts(output: SchedulerOutput, running: Sequence[Served]) -> Iterator[tuple[int, WrongDrafts]]:
    """The logits rows of a step behind wrong drafts of chains, and what stands before each."""
    end, trees = 0, {place for place, _ in output.trees}
    columns = zip(running, output.first_rows(), output.num_samples, output.num_computed_tokens, strict=True)
    for place, (one, first_row, num_samples, start) in enumerate(columns):
        count = output.num_scheduled_tokens[place]
        end += count
        if num_samples <= 1 or place in trees:
            continue
        drafts = output.token_ids[end - num_samples + 1 : end]
        position = start + count - num_samples + 1  # of the first draft
        known = one.tokens(position, len(drafts))
        wrong = next((n for n, (draft, token) in enumerate(zip(drafts, known, strict=True)) if draft != token), None)
        if wrong is not None:
            for last in range(wrong, len(drafts)):
                yield first_row + last + 1, (one.number, position + wrong, drafts[wrong : last + 1])


def known_tokens(output: SchedulerOutput, running: Sequence[Served]) -> tuple[int, ...]:
    """A token for each logits row of a step."""
    sampled: list[int] = []
    trees = dict(output.trees)
    columns = output.num_samples, output.num_computed_tokens, output.num_scheduled_tokens
    for place, (one, num_samples, start, count) in enumerate(zip(running, *columns, strict=True)):
        rows = max(1, num_samples)
        known = one.tokens(start + count + 1 - rows, rows)
        # The rows of a tree at one depth sample the same token, as far as they are on the path that came.
        sampled += known if place not in trees else [known[depth] for depth in tree_depths(trees[place])]
    return tuple(sampled)


def _vocab_size(requests: Sequence[KnownRequest]) -> int:
    return 1 + max(max(*one.prompt_token_ids, *one.output_token_ids) for one in requests)
