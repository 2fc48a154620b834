"""B3: a tag in every KV slot, of layer, token, position and all tokens before it; re-checked at every step.

All that moves tokens into slots is real: the scheduler, ``RequestRows``, the choice of a bucket, ``StepBuffers``, the
step function with its feedback, swapping, copying, and the cache's tensors. Only the model is not: where it would write
keys and values, it writes tags, and where it would attend, it reads them back.
"""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.models.inputs import KVCache, LayerCache, StateCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.models.weights import tensors
from compiled_llm.scheduling.block_pool import SINK_BLOCK, BlockPool
from compiled_llm.scheduling.bucket import buckets_of, choose_bucket
from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.step.step import Feedback, step_function
from compiled_llm.worker.block_copies import SwapSpace
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.step_buffers import StepBuffers
from tests.battery import sized
from tests.battery.test_schedules import (
    MAX_LEN,
    Watch,
    end_forking_at_random,
    fork_at_random,
    random_request,
    random_scheduler,
)
from tests.fake_engine import VOCABULARY, Context, expected_tokens, result_of

# What a slot holds, in the head's dimension of a layer's keys; its values hold the same with the signs changed. The
# last layer has a scale for each key too, its position: so its blocks differ in bytes from those of the others.
LAYER, TOKEN, POSITION, CONTEXT = range(4)
NUM_LAYERS = 2
POISON = -7  # stands in blocks that nobody uses


class Truth:
    """All that a request is ever going to be: its tokens, and what should stand in their slots."""

    def __init__(self, request: Request) -> None:
        count = request.max_num_tokens - len(request.prompt_token_ids)
        self.tokens = request.prompt_token_ids + expected_tokens(request.prompt_token_ids, count)
        self.tags = tags_of(self.tokens)


def tags_of(tokens: Sequence[int]) -> Tensor:
    """What should be in the slots of ``tokens``, in the first layer: ``[T, 4]``."""
    context, tags = 0, []
    for position, token_id in enumerate(tokens):
        context = Context.after(context, token_id)
        tags.append([0, token_id, position, context])
    return torch.tensor(tags)


class TagModel:
    """The forward of a model whose keys and values are tags. It knows a step by its tensors alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def forward(self, weights: None, step_input: StepInput, kv_cache: KVCache, config: object, layers: tuple) -> Tensor:
        """Write a tag for each token, padding included, and return them all."""
        s = step_input
        tags = torch.stack([torch.zeros_like(s.input_ids), s.input_ids, s.positions, torch.full_like(s.positions, -1)])
        tags = tags.T.long()
        states = kv_cache[-1] if s.states is not None else None
        slots = [] if s.states is None else s.states.read_slot.tolist()
        read = {slot: states.convolution[slot, 0].tolist() for slot in set(slots)} if states is not None else {}
        starts, positions = s.query_start_loc.tolist(), s.positions.tolist()
        rows = [row for row in range(len(s.seq_lens)) if starts[row + 1] > starts[row]]
        # A row may continue what another one writes in this very step, and that one another's: again, until all agree.
        before = None
        while before is None or not torch.equal(before, tags):
            before = tags.clone()
            for row in rows:
                assert 1 <= starts[row + 1] - starts[row] <= layers[0].max_query_len
                first = positions[starts[row]]
                if states is None:
                    context = self._context(s, kv_cache, row, first - 1) if first else 0
                else:
                    context = 0
                    if first:
                        num_tokens, context = read[slots[row]]
                        assert num_tokens == first, "a state of other tokens is read"
                for index in range(starts[row], starts[row + 1]):
                    context = Context.after(context, int(tags[index, TOKEN]))
                    tags[index, CONTEXT] = context
            self._write(kv_cache[:NUM_LAYERS], 0, s.slot_mapping, tags)
            for number, table in enumerate(s.windows, NUM_LAYERS):
                self._write(kv_cache[number : number + 1], number, table.slot_mapping, tags)
        if states is not None:
            self._write_states(s, states, tags)
        return tags

    def _write_states(self, s: StepInput, states: StateCache, tags: Tensor) -> None:
        assert s.states is not None
        for row, (slots, ends) in enumerate(zip(*(side.tolist() for side in s.states[1:]), strict=True)):
            for slot, end in zip(slots, ends, strict=True):
                assert bool(slot) == bool(end), "a state is written to the sink"
                if end:
                    index = int(s.query_start_loc[row]) + end - 1
                    states.convolution[slot, 0] = torch.stack([tags[index, POSITION] + 1, tags[index, CONTEXT]])

    def layers(self, config: object) -> tuple:
        return (AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0),)  # of one, for what steps may have

    def head(self, weights: None, rows: Tensor, config: object) -> Tensor:
        """Logits with the next token of each row on top."""
        logits = torch.zeros(len(rows), VOCABULARY)
        for row, tags in enumerate(rows):
            logits[row, Context.next_token(int(tags[CONTEXT]))] = 1.0
        return logits

    def _context(self, s: StepInput, kv_cache: KVCache, row: int, position: int) -> int:
        block = s.block_table[row, position // self.block_size]
        return int(kv_cache[0].k[block, 0, position % self.block_size, CONTEXT])

    def _write(self, kv_cache: KVCache, first: int, slot_mapping: Tensor, tags: Tensor) -> None:
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for layer, cache in enumerate(kv_cache, first):
            tags[:, LAYER] = layer
            cache.k[blocks, 0, offsets] = tags
            cache.v[blocks, 0, offsets] = -tags
            if cache.k_scale is not None:
                cache.k_scale[blocks, 0, offsets] = tags[:, POSITION].float()
        tags[:, LAYER] = 0


class TagRunner:
    """The parts of ``ModelRunner`` between the scheduler and the forward, and the checks of what they did."""

    def __init__(self, scheduler: Scheduler, model: TagModel, counts: Counter[str]) -> None:
        self.scheduler, self.limits, self.counts = scheduler, scheduler.limits, counts
        cpu = torch.device("cpu")
        windows = scheduler.pool.windows
        self.rows = RequestRows(self.limits, VOCABULARY, num_windows=len(windows))
        self.buckets = buckets_of(self.limits)
        self.buffers = {
            bucket: StepBuffers(bucket, self.limits, cpu, [window.window for window in windows])
            for bucket in self.buckets
        }
        layers = [self._cache(scheduler.pool.num_blocks) for _ in range(NUM_LAYERS)]
        layers[-1] = layers[-1]._replace(k_scale=torch.full(layers[-1].k.shape[:-1], float(POISON)))
        of_windows = [self._cache(window.num_places) for window in windows]
        num_slots = self.limits.num_state_slots
        states = [StateCache(torch.full((num_slots + 1, 1, 2), POISON))] if num_slots else []
        self.kv_cache: KVCache = (*layers, *of_windows, *states)
        self.groups = [tensors(tuple(layers)), *(tensors(layer) for layer in of_windows), tensors(tuple(states))]
        self.caches = self.groups[0]
        self.swap_space = SwapSpace(self.groups, scheduler.swap_pool.num_blocks, scheduler.swap_pool.states.num_slots)
        self.last_tokens = torch.full((max(bucket.num_rows for bucket in self.buckets),), POISON, dtype=torch.int64)
        self.hidden = torch.zeros(max(bucket.num_tokens for bucket in self.buckets), 4, dtype=torch.int64)
        config = SimpleNamespace(architecture="tags", stream=None, own_layers=None)
        self.steps = {bucket: step_function(config, bucket.max_query_len) for bucket in self.buckets}
        self.truths: dict[str, Truth] = {}
        self._poisoned_rows: set[int] = set()

    def execute(self, output: SchedulerOutput) -> StepResult:
        bucket = choose_bucket(self.buckets, output)
        rows = self.rows.update(output)
        buffers = self.buffers[bucket]
        buffers.fill(output, rows, self.rows)
        if output.moves_blocks:
            self.swap_space.copy(output, self.groups)
        before = [[cache.clone() for cache in caches] for caches in self.groups]
        feedback = Feedback(buffers.feedback, self.last_tokens, self.hidden)
        self.steps[bucket](SimpleNamespace(head=None), buffers.step_input, self.kv_cache, feedback)
        tables = [buffers.step_input, *buffers.step_input.windows]
        for table, caches, old in zip(tables, self.groups[:-1], before[:-1], strict=True):
            self._check_writes(table.slot_mapping, output, caches, old)
        self._check_reads(buffers, output)
        self.counts["padding tokens"] += bucket.num_tokens - output.num_tokens
        self.counts["padding rows"] += bucket.num_requests - len(rows)
        self.counts["tokens fed back"] += sum(place >= 0 for place in output.feedback)
        self.counts["blocks swapped out"] += len(output.swapped_out)
        self.counts["blocks swapped in"] += len(output.swapped_in)
        self.counts["blocks copied"] += len(output.copies)
        self.counts["states written"] += sum(map(len, output.states.writes))
        self.counts["states swapped out"] += len(output.states.swapped_out)
        self.counts["states swapped in"] += len(output.states.swapped_in)
        self.counts["rows of drafts"] += sum(max(0, count - 1) for count in output.num_samples)
        return result_of(self.last_tokens[: sum(max(1, count) for count in output.num_samples)].tolist())

    def _cache(self, num_blocks: int) -> LayerCache:
        shape = (num_blocks + 1, 1, self.limits.block_size, 4)
        return LayerCache(*(torch.full(shape, POISON) for _ in range(2)))

    def _check_writes(
        self, slot_mapping: Tensor, output: SchedulerOutput, caches: list[Tensor], before: list[Tensor]
    ) -> None:
        """Padding went to the sink alone, tokens to different slots outside of it, and nothing else has changed."""
        slots = slot_mapping.tolist()
        own, padding = slots[: output.num_tokens], slots[output.num_tokens :]
        assert len(set(own)) == len(own), "two tokens went to one slot"
        assert all(slot // self.limits.block_size != SINK_BLOCK for slot in own)
        assert all(slot // self.limits.block_size == SINK_BLOCK for slot in padding)
        blocks = torch.tensor(own) // self.limits.block_size
        offsets = torch.tensor(own) % self.limits.block_size
        for cache, old in zip(caches, before, strict=True):
            old[blocks, 0, offsets] = cache[blocks, 0, offsets]
            assert torch.equal(cache[SINK_BLOCK + 1 :], old[SINK_BLOCK + 1 :]), "a slot of someone else was written to"

    def _check_reads(self, buffers: StepBuffers, output: SchedulerOutput) -> None:
        """What each row sees, by its own length and block table, is its request's, in every layer."""
        s, size, num_tokens, first_rows = buffers.step_input, self.limits.block_size, 0, output.first_rows()
        for index, request_id in enumerate(output.request_ids):
            length, num_samples = int(s.seq_lens[index]), output.num_samples[index]
            assert length == output.num_computed_tokens[index] + output.num_scheduled_tokens[index]
            num_tokens += output.num_scheduled_tokens[index]
            tags, num_drafts = self.truths[request_id].tags[:length].clone(), max(0, num_samples - 1)
            if num_drafts:
                drafts = output.token_ids[num_tokens - num_drafts : num_tokens]
                tags = tags_of([*tags[: length - num_drafts, TOKEN].tolist(), *drafts])
            positions = torch.arange(length)
            blocks, offsets = s.block_table[index].long()[positions // size], positions % size
            for layer, cache in enumerate(self.kv_cache[:NUM_LAYERS]):
                expected = tags.clone()
                expected[:, LAYER] = layer
                assert torch.equal(cache.k[blocks, 0, offsets], expected), f"a foreign tag in {request_id}"
                assert torch.equal(cache.v[blocks, 0, offsets], -expected), f"a foreign tag in {request_id}"
                if cache.k_scale is not None:
                    assert torch.equal(cache.k_scale[blocks, 0, offsets].long(), positions), "a foreign scale"
            for number, (table, window) in enumerate(zip(s.windows, self.scheduler.pool.windows, strict=True)):
                seen = positions[max(0, output.num_computed_tokens[index] - window.window + 1) :]
                blocks, offsets = table.block_table[index].long()[seen // size], seen % size
                expected = tags[seen]
                expected[:, LAYER] = NUM_LAYERS + number
                found = self.kv_cache[NUM_LAYERS + number].k[blocks, 0, offsets]
                assert torch.equal(found, expected), f"a foreign tag in a window of {request_id}"
                self.counts["tags of windows checked"] += len(seen)
            for place in range(num_drafts + 1):
                row, position = first_rows[index] + place, length - num_drafts + place
                if num_samples:
                    assert int(self.last_tokens[row]) == Context.next_token(int(tags[position - 1, CONTEXT]))
                assert int(buffers.sampling_input.position[row]) == position
            self.counts["tags checked"] += length * len(self.caches)
        assert not s.seq_lens[len(output.request_ids) :].any()

    def poison(self) -> None:
        """Overwrite every block that holds nothing, on the device and on the host: whoever reads it finds no tag."""
        to_copy = {block for block, _ in self.scheduler.running_set.swapped_out}
        blocks = _empty_blocks(self.scheduler.pool) - to_copy
        for cache in self.caches:
            cache[list(blocks)] = POISON
        states = self.scheduler.pool.states
        if states.num_slots:
            to_copy = {slot for slot, _ in states.swapped_out}
            self.kv_cache[-1].convolution[list(states.empty_slots() - to_copy)] = POISON
        for window, caches in zip(self.scheduler.pool.windows, self.groups[1:-1], strict=True):
            to_copy = {place for place, _ in window.swapped_out}
            for cache in caches:
                cache[list(window.empty_places() - to_copy)] = POISON
        rows = {block - 1 for block in _empty_blocks(self.scheduler.swap_pool)}
        for pool in self.swap_space.pools[:-1]:
            pool[list(rows - self._poisoned_rows)] = 255
        self._poisoned_rows = rows


def _empty_blocks(pool: BlockPool) -> set[int]:
    blocks = range(1, pool.num_blocks + 1)
    return {block for block in blocks if pool.num_references(block) == 0 and pool.digest(block) is None}


class TagEngine:
    """The engine's loop, as ``FakeEngine`` has it."""

    def __init__(self, scheduler: Scheduler, runner: TagRunner, *, overlap: bool) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.outputs: list[SchedulerOutput] = []
        self._launched: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self._most_launched = 2 if overlap else 1

    def step(self) -> None:
        output = self.scheduler.schedule()
        if output.request_ids:
            self.outputs.append(output)
            self._launched.append((output, self.runner.execute(output)))
        if len(self._launched) == self._most_launched or not output.request_ids:
            self.scheduler.update(*self._launched.popleft())
        check_scheduler(self.scheduler)
        self.runner.poison()


def with_buckets(scheduler: Scheduler) -> EngineLimits:
    """Its limits, with a bucket for one request and for all, so that there are padding rows."""
    seats = scheduler.limits.max_num_seqs
    return dataclasses.replace(scheduler.limits, decode_bucket_sizes=tuple(sorted({1, min(3, seats), seats})))


def run_schedule(seed: int, counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    scheduler = random_scheduler(rng, drafts=True, streams=False, trees=False, adapters=False)
    scheduler.limits = with_buckets(scheduler)
    model = TagModel(scheduler.limits.block_size)
    for module in ("step.step", "models.registry"):
        monkeypatch.setattr(f"compiled_llm.{module}.family_of", lambda config: model)
    runner = TagRunner(scheduler, model, counts)
    watch = Watch(TagEngine(scheduler, runner, overlap=rng.random() < 0.5))
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(MAX_LEN - 1)] for _ in range(3)]
    queue = [random_request(rng, f"{seed}-{i}", prefixes) for i in range(rng.randint(1, 24))]
    runner.truths = {request.request_id: Truth(request) for request in queue}
    num_forks = rng.randint(0, 8)
    for _ in range(10_000):
        while queue and rng.random() < 0.5:
            watch.add(queue.pop(0))
        if watch.unfinished and rng.random() < 0.03:
            watch.abort(rng.choice(list(watch.unfinished)))
        if num_forks and watch.unfinished and rng.random() < 0.2:
            num_forks -= 1
            for child in fork_at_random(rng, watch, f"{seed}/{num_forks}"):
                runner.truths[child.request_id] = Truth(child)
        end_forking_at_random(rng, watch)
        if watch.unfinished:
            watch.step()
        elif not queue:
            break
    watch.check_ends()
    watch.count(counts)


@sized("num_schedules", 30, 500)
def test_random_schedules(num_schedules: int, battery_counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(num_schedules):
        try:
            run_schedule(seed, battery_counts, monkeypatch)
        except BaseException as error:
            error.add_note(f"in schedule {seed}")
            raise
    for what, count in battery_counts.items():
        assert count > 0, what
