"""How drafts fare on outputs that are known: the scheduler serves them again, beside a worker that looks them up.

The scheduler and the method are those of an engine, so what is drafted, how much of it a step takes and what is
accepted are what an engine of the same limits would have. Only the seconds of a step are looked up, too.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.methods import host_source
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.decode_costs import DecodeCosts
from compiled_llm.scheduling.draft_trees import tree_depths
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
    """

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    ends_by_length: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay counted.

    Attributes:
        num_drafts, num_draft_tokens, num_accepted_by_position: as in ``EngineStats``.
        num_decode_tokens: tokens that steps without prompts gave; ``decode_seconds`` are those of these steps.
        draft_seconds: that all looking for drafts took here.
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
) -> Replay:
    """Serve ``requests`` once more, all there from the start, in their order.

    Args:
        limits: of the engine, without drafts or with any.
        config: how tokens are drafted; None: none are.
        seconds: of steps, of each batch size of ``limits`` some; None: 0, and ``adaptive`` must be off.

    Raises:
        ValueError: a vocabulary is too large for the method; ``seconds`` lack a batch size.
    """
    source = None
    if config is not None:
        assert seconds is not None or not config.adaptive
        source = host_source(config, _vocab_size(requests))
        limits = limits.with_drafts(config.num_tokens, one_graph=limits.mixes_lens, has_trees=config.has_trees)
    buckets = buckets_of(limits)
    costs = {
        (bucket.num_requests, bucket.num_tokens): seconds_of(bucket, seconds) if seconds else 0.0
        for bucket in buckets
        if bucket.kind == "decode"
    }
    num_blocks = limits.max_num_seqs * (limits.blocks_per_request + 1)
    # Where one graph serves all sizes, a step computes its own. What such a step takes follows from all that is known,
    # with drafts and without.
    pads = not limits.mixes_lens
    measured = tuple((costs if pads else {**seconds, **costs}).items()) if seconds else ()
    expected = DecodeCosts(measured, pads=pads)
    scheduler = Scheduler(
        limits, BlockPool(num_blocks), drafter=source, decode_seconds=measured, costs=StepCosts(pads=pads)
    )
    served = {RequestId(str(number)): _Served(known, number) for number, known in enumerate(requests)}
    for one in served.values():
        scheduler.add(one.request)
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
        scheduler.update(output, StepResult(bucket, _sampled(output, running), seconds=step_seconds))
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


class _Served:
    """A request of the scheduler, and its output as it is known."""

    def __init__(self, known: KnownRequest, number: int) -> None:
        prompt, output = list(known.prompt_token_ids), list(known.output_token_ids)
        self.output = output
        # A stop token ends it within a step, as in an engine, unless it was among the tokens before.
        stops = not known.ends_by_length and Counter(output)[output[-1]] == 1
        room = 0 if known.ends_by_length else 16
        self.request = Request(
            request_id=RequestId(str(number)),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=len(output) + room),
            seed=0,
            stop_token_ids=frozenset(output[-1:] if stops else ()),
            max_num_tokens=len(prompt) + len(output) + room,
            arrival_time=0.0,
        )

    def tokens(self, first_position: int, count: int) -> list[int]:
        """What is sampled at so many positions of prompt and output; past the end what no draft is equal to."""
        start = first_position - len(self.request.prompt_token_ids)
        tokens = self.output[start : start + count] if start >= 0 else []
        return [*tokens, *[_NO_DRAFT] * (count - len(tokens))]

    def end(self, scheduler: Scheduler) -> None:
        """End the request where its output ended for a reason that the scheduler does not know."""
        if self.request.status is Status.FINISHED or len(self.request.output_token_ids) < len(self.output):
            return
        scheduler.drop_output(self.request, len(self.output))
        scheduler.end(self.request, "stop")


_NO_DRAFT = 2**31 - 1


def _sampled(output: SchedulerOutput, running: Sequence[_Served]) -> tuple[int, ...]:
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
