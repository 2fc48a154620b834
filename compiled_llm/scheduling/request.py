"""Request: one generation on its way through the engine. Only code of this folder writes to it."""

import dataclasses
import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from compiled_llm.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from compiled_llm.scheduling.draft_trees import DraftTree


class RequestId(NamedTuple):
    """What scheduler and worker call a request: by its user's name, and the number of its continuation or beam."""

    name: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name} [{self.number}]" if self.number else self.name


class BlockSource(NamedTuple):
    """Another engine that has blocks of a request.

    Attributes:
        address: where it gives them, as ``kv_transfer_address``.
        lease: what it calls the request: it keeps the blocks for that.
        is_early: whether it may not know the request yet.
    """

    address: str
    lease: bytes
    is_early: bool = False


class Mask(Protocol):
    """Which tokens may come next in one generation."""

    def words(self, output_token_ids: Sequence[int], num_output_tokens: int) -> "np.ndarray | None":
        """int32 ``[ceil(V / 32)]``: bit v % 32 of word v // 32 for token v; None: no token may come.

        ``num_output_tokens``: all before the next one, of which the last may not be among ``output_token_ids`` yet.
        """
        ...

    def after_drafts(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> "list[np.ndarray]":
        """For each of the first drafts that may come one after the other: as ``words``, of the token after it.

        All tokens of the output are known. None of the drafts that are left is one after which the output ends.
        """
        ...


@dataclasses.dataclass(slots=True)
class Held:
    """Which of its blocks a request needs in the layers with a sliding window: ``first..end - 1``, by index.

    Such layers have a memory of their own, smaller than that of the other layers: a *place* in it holds the keys of one
    block (``window_pool.py``). Places of the request's sink tokens are needed besides.

    Attributes:
        sent: how many entries of the worker's table are up to date, those before ``first`` among them.
    """

    first: int
    end: int
    sent: int = 0


@dataclasses.dataclass(slots=True)
class HeldState:
    """In layers with a recurrent state, such as Mamba's: the slots that a request needs. A slot holds one state.

    Attributes:
        slot: its state after ``num_computed_tokens``; 0: nothing is computed.
        target: the slot that the step which is being scheduled writes the state to; 0 between steps.
        drafted: while a step verifies drafts: its state after each token of that step.
        snapshots: (tokens, slot) that steps in flight write, to be published with their blocks.
        wanted: where the next snapshot is of use to others that share the prefix, in tokens; 0: nowhere.
        before_last: its state before the last token of its prompt, for forks that compute that token themselves; 0: it
            is not kept.
        own_snapshot: the digest of the snapshot of its own output; b"": there is none.
    """

    slot: int = 0
    target: int = 0
    drafted: list[int] = dataclasses.field(default_factory=list)
    snapshots: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    wanted: int = 0
    before_last: int = 0
    own_snapshot: bytes = b""

    def slots(self) -> list[int]:
        """All that it needs, some twice."""
        targets = [self.target] if self.target and self.target != self.slot else []
        held = self.slot, self.before_last, *targets, *self.drafted, *(slot for _, slot in self.snapshots)
        return [slot for slot in held if slot]


class Status(enum.Enum):
    WAITING = "waiting"  # no KV blocks on the device; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """Tokens known and tokens computed; the scheduler lets the second catch up with the first.

    Attributes:
        seed: decides the random numbers of this request, together with the position alone.
        stop_token_ids: all ids that end it, the model's end-of-text ids included.
        max_num_tokens: prompt and output together never exceed this. As long as the prompt: nothing is generated.
        priority: lower is served first, under the policy that asks for it.
        cache_salt: requests share cached blocks only with requests of the same salt.
        adapter: digest of the adapter that it is served with; requests of others share no blocks with it. "": none.
        adapter_name: what its user calls it.
        mask: which tokens may come next; None: all.
        scored_token_ids: the prompt, and the token after it if that is scored too, where log-probabilities of them are
            asked for; else empty.
        num_scored: how many of the first ``scored_token_ids`` have their log-probabilities, or are not asked about.
        waits_for_tokens: whether the host has to know the token of its last step before its next one.
        keeps_blocks: whether its blocks stay when it ends, to be forked.

        generates: whether tokens are to follow its prompt; else it ends when the prompt is computed.
        rank: its order among the others, lower first: (priority or 0, order of arrival); with adapters
            (priority or 0, its adapter's turn, order of arrival).
        num_tokens: tokens known, and tokens that steps in flight will sample.
        num_in_flight: how many of ``num_tokens`` are not known to the host yet.
        num_computed_tokens: tokens whose keys and values are in the cache, or will be when the steps in flight end.
        block_ids: KV blocks in the order of the positions they hold.
        host_block_ids: its blocks in host memory while it is swapped out.
        num_sent_blocks: how many entries of its block table the worker knows.
        block_digests: of its full blocks, as far as they were needed; see ``block_pool.block_digest``.
        num_published_blocks: how many of its blocks can be found by others.
        held: for each window of the pool, the blocks whose places it needs there; empty while it has no blocks.
        state: the slots that it needs for states, of models that have some.
        host_slot: of its state in host memory while it is swapped out; 0: none.
        num_dropped_tokens: of a stream: how many tokens had left the cache when its sink tokens were computed last.
        forked_index: index of the block, not full, that it shares with others since a fork; -1: there is none.
        last_row: its first logits row in the last step that ran it: the token in flight is sampled there.
        next_look: a shortcut of ``StepPlanner``: as long as ``num_tokens`` is below this, the request's next step
            computes one token and needs nothing else, such as a block; 0: it has to be looked at.
        pending_error: why it ends with its next token, though the model could go on; None: it does not.
        next_event: a shortcut of ``Scheduler.update``: as long as a step ends below this many tokens, its result is a
            token and nothing else follows, such as a full block; 0: it has to be looked at.
        takes_drafts: whether a drafter may guess its tokens.
        draft_masks: of the tokens after these guesses, where it has a mask.
        draft_tree: these guesses, where they are a tree and no chain; see ``DraftTree``.
        draft_token_ids: guesses that the step in flight verifies; ``num_tokens``, ``num_in_flight`` and
            ``num_computed_tokens`` count them until then.
        num_cached_tokens: prompt tokens found in the cache when it was first admitted; -1 before.
        num_lost_tokens: computed tokens that its last preemption threw away.
        num_unexplained_faults: how many steps failed that it was in, and of which no request was the cause.
        source: another engine from which its first blocks are fetched when it is admitted; None: there is none.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    adapter_name: str = ""
    mask: Mask | None = None
    scored_token_ids: Sequence[int] = ()
    num_scored: int = 0
    waits_for_tokens: bool = False
    keeps_blocks: bool = False

    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    generates: bool = dataclasses.field(init=False)
    rank: tuple[int, ...] = (0, 0)
    num_tokens: int = 0
    num_in_flight: int = 0
    num_computed_tokens: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    host_block_ids: list[int] = dataclasses.field(default_factory=list)
    num_sent_blocks: int = 0
    block_digests: list[bytes] = dataclasses.field(default_factory=list)
    num_published_blocks: int = 0
    held: list[Held] = dataclasses.field(default_factory=list)
    state: HeldState = dataclasses.field(default_factory=HeldState)
    host_slot: int = 0
    num_dropped_tokens: int = 0
    forked_index: int = -1
    last_row: int = -1
    next_look: int = 0
    next_event: int = 0
    takes_drafts: bool = False
    draft_token_ids: list[int] = dataclasses.field(default_factory=list)
    draft_masks: "Sequence[np.ndarray]" = ()
    draft_tree: "DraftTree | None" = None
    pending_error: str | None = None
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = -1
    num_lost_tokens: int = 0
    num_unexplained_faults: int = 0
    source: BlockSource | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_tokens: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self) -> None:
        self.generates = self.max_num_tokens > len(self.prompt_token_ids)
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def most_cached_tokens(self) -> int | None:
        """How many of its first tokens may be found in blocks that others computed; None: all but the last.

        A token that is to be scored has to have the token before it computed.
        """
        return self.num_scored - 1 if self.num_scored < len(self.scored_token_ids) else None

    def prompt_targets(self, start: int, count: int) -> tuple[int, Sequence[int]]:
        """What to score in a step that computes ``count`` tokens from ``start`` on.

        Returns (place, ids): the step's token with index ``place`` is followed by the first of these ids.
        """
        first = max(self.num_scored, start + 1)
        return first - start - 1, self.scored_token_ids[first : start + count + 1]

    def add_drafts(self, token_ids: list[int]) -> None:
        """The step that computes its last known token computes these as well."""
        self.draft_token_ids = token_ids
        self._count_drafts(len(token_ids))

    def cancel_drafts(self) -> None:
        """Of the step in flight, the token after the last known one will count, and no draft."""
        self._count_drafts(-len(self.draft_token_ids))
        self.draft_token_ids, self.draft_tree = [], None

    def _count_drafts(self, count: int) -> None:
        self.num_tokens += count
        self.num_in_flight += count
        self.num_computed_tokens += count

    def end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """It is finished. Blocks that it has are freed by the scheduler."""
        self.status = Status.FINISHED
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.finished_time = self.finished_time or time.monotonic()

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens at positions ``start..end - 1``; fewer where not all of them are known."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : end - prompt_len]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - prompt_len)]
