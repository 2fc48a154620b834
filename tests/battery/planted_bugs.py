"""The bugs of B16: each replaces one text in the source of one module, and the checks named with it must see it.

A bug is one that somebody could make, or has made in another engine, and that the checks are there for. Changes that
only cost time, or that nothing can observe, are none.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Checks:
    """Tests that run one after another in a process of their own, until one fails.

    Attributes:
        tests: files or single tests, for pytest; of batteries the small size runs.
        load_torch: whether they need the ``conftest.py`` files, which load torch; without it a run takes half the time.
    """

    tests: tuple[str, ...]
    load_torch: bool


@dataclasses.dataclass(frozen=True)
class Bug:
    """``old`` stands once in the source of ``module``; with ``new`` in its place, the checks must fail."""

    name: str
    module: str
    old: str
    new: str

    def planted(self, source: str) -> str:
        count = source.count(self.old)
        assert count == 1, f"{self.name}: the old text stands {count} times in {self.module}, not once"
        return source.replace(self.old, self.new)


POOL = Checks(
    (
        "tests/battery/test_block_pool.py::test_random_operations",
        "tests/scheduling/test_block_pool.py",
        "tests/scheduling/test_prefix_cache.py",
    ),
    load_torch=False,
)
SCHEDULING = Checks(
    (
        "tests/battery/test_schedules.py::test_random_schedules",
        "tests/scheduling/test_request_queue.py",
        "tests/scheduling/test_scheduler.py",
        "tests/scheduling/test_scheduler_overlap.py",
        "tests/scheduling/test_scheduler_preemption.py",
        "tests/scheduling/test_scheduler_prefixes.py",
        "tests/scheduling/test_scheduler_prompts_alone.py",
        "tests/scheduling/test_forks.py",
        "tests/battery/test_planted_bugs_checks.py",
    ),
    load_torch=False,
)
FORKS = Checks(
    ("tests/battery/test_schedules.py::test_random_schedules", "tests/scheduling/test_forks.py"), load_torch=False
)
WINDOWS = Checks(
    ("tests/scheduling/test_window_pool.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
STATES = Checks(
    ("tests/scheduling/test_state_slots.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
SUSPECTS = Checks(
    ("tests/scheduling/test_suspects.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
SCORING = Checks(
    (
        "tests/scheduling/test_scheduler_prompts_alone.py",
        "tests/e2e/test_scoring.py::test_only_what_is_asked_for_is_computed",
        "tests/e2e/test_scoring.py::test_equal_to_the_bit_to_generating[bfloat16]",
    ),
    load_torch=True,
)
DRAFTS = Checks(
    ("tests/scheduling/test_drafts.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
TAGS = Checks(("tests/battery/test_tags.py", "tests/worker/test_step_buffers.py"), load_torch=True)
COPIES = Checks(("tests/ops/test_swap.py::test_round_trip[mixed-(2, 3, 7)-cpu]",), load_torch=True)
BLOCK_COPIES = Checks(("tests/ops/test_swap.py::test_copies_within_the_pool",), load_torch=True)
BEAM_GROUP = Checks(("tests/engine/test_beam_search.py",), load_torch=True)
BEAMS = Checks(
    (
        "tests/e2e/test_beam_search.py::test_equal_to_transformers[blocks of 4]",
        "tests/e2e/test_beam_search.py::test_end_of_text_is_reached",
        "tests/e2e/test_beam_search.py::test_beams_share_their_blocks",
    ),
    load_torch=True,
)
ENGINE = Checks(
    (
        "tests/worker/test_block_copies.py",
        "tests/battery/test_identity.py::test_tokens_equal_the_reference[small-chunks-swap-async-priority]",
    ),
    load_torch=True,
)
ABORTS = Checks(("tests/e2e/test_engine.py::test_a_stream_closed_early_aborts_its_request",), load_torch=True)
SAMPLER = Checks(("tests/step/test_sampling.py",), load_torch=True)
QUANTISED = Checks(
    (
        "tests/ops/attention/test_kv_quant.py",
        "tests/ops/attention/test_paged_attention.py::test_kernel[mixed-gqa4-h64-int8]",
    ),
    load_torch=True,
)

_BLOCK_POOL = [
    (
        "the sink is handed out",
        "self._empty = list(range(num_blocks, SINK_BLOCK, -1))",
        "self._empty = list(range(num_blocks - 1, SINK_BLOCK - 1, -1))",
    ),
    (
        "one block of the pool is never handed out",
        "self._empty = list(range(num_blocks, SINK_BLOCK, -1))",
        "self._empty = list(range(num_blocks - 1, SINK_BLOCK, -1))",
    ),
    (
        "one block more than there are is promised",
        "if count > len(self._empty) + len(self._cached):",
        "if count > len(self._empty) + len(self._cached) + 1:",
    ),
    (
        "a double free goes unnoticed",
        'assert count >= 0, f"block {block} is not in use"',
        "count = max(0, count)",
    ),
    (
        "a second table that shares a block is not counted",
        "        self._references[block] += 1\n\n    def num_references",
        "        self._references[block] = 1\n\n    def num_references",
    ),
    (
        "a cached block that is used again may still be evicted",
        "del self._cached[block]  # a KeyError: the block holds nothing",
        "pass",
    ),
    (
        "a shared block is free when its first user leaves",
        "            if count == 0:\n                if block in self._digest_of:",
        "            if count <= 1:\n                if block in self._digest_of:",
    ),
    (
        "parents are evicted before their children",
        "for block in reversed(blocks):",
        "for block in blocks:",
    ),
    (
        "the most recently used is evicted",
        "popitem(last=False)",
        "popitem(last=True)",
    ),
    (
        "an evicted block can still be found",
        "        del self._block_of[digest]\n",
        "",
    ),
    (
        "a published block is given out as if it was empty",
        "                if block in self._digest_of:\n                    self._cached[block] = None",
        "                if block in self._digest_of and self._empty:\n                    self._cached[block] = None",
    ),
    (
        "digests leave the parent out",
        'hashlib.sha256(parent + array("q", token_ids).tobytes())',
        'hashlib.sha256(array("q", token_ids).tobytes())',
    ),
]

_PREFIX_CACHE = [
    (
        "a hit may be the whole prompt",
        "most = (request.num_tokens - 1) // self.block_size",
        "most = request.num_tokens // self.block_size",
    ),
    (
        "digests leave the salt out",
        "root_digest(*self._facts, request.cache_salt)",
        "root_digest(*self._facts)",
    ),
    (
        "digests leave the model out",
        "root_digest(*self._facts, request.cache_salt)",
        "root_digest(request.cache_salt)",
    ),
    (
        "a block is published before it is full",
        "count = num_tokens // self.block_size",
        "count = -(-num_tokens // self.block_size)",
    ),
    (
        "a promised block is read before it is filled",
        "return request.num_computed_tokens >= (index + 1) * self.block_size",
        "return request.num_computed_tokens >= index * self.block_size",
    ),
    (
        "a table keeps its own copy of a block that was published before",
        "                request.block_ids[index] = holder\n",
        "",
    ),
    (
        "the runner is not told that a block was exchanged",
        "request.num_sent_blocks, request.next_look = min(request.num_sent_blocks, index), 0",
        "pass",
    ),
    (
        "promises of a request that leaves are not withdrawn",
        "if self._pending.get(digest, (None,))[0] is request:",
        "if False:",
    ),
    (
        "a promise of somebody else is withdrawn",
        "if self._pending.get(digest, (None,))[0] is request:",
        "if digest in self._pending:",
    ),
    (
        "who is forgotten is woken all the same",
        "self._held_back[digest].remove(request)\n        if not self._held_back[digest]:\n"
        "            del self._held_back[digest]",
        "pass",
    ),
]

_REQUEST_QUEUE = [
    (
        "the last by rank is served first",
        "if fits and (best is None or request.rank < best.rank):",
        "if fits and (best is None or request.rank > best.rank):",
    ),
    (
        "a request that left the queue is served",
        "while heap and self._entry_of.get(heap[0][2]) != heap[0][1]:",
        "while False:",
    ),
    (
        "a request is served that lacks more than fits",
        "fits = most_tokens is None or _lacking(request) <= most_tokens",
        "fits = True",
    ),
    (
        "cleaning up loses a request",
        "self._heaps[length] = [item for item in heap if self._entry_of.get(item[2]) == item[1]]",
        "self._heaps[length] = [item for item in heap[1:] if self._entry_of.get(item[2]) == item[1]]",
    ),
]

_REQUEST = [
    (
        "output tokens are not computed again after a preemption",
        "return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - prompt_len)]",
        "return self.prompt_token_ids[start:end]",
    ),
]

_SCHEDULER = [
    # Aborts
    (
        "an abort leaks blocks",
        "        self.running_set.remove(request)\n        request.end(",
        '        if finish_reason == "abort" and request.status is Status.RUNNING:\n'
        "            self.running.remove(request)\n"
        "        else:\n"
        "            self.running_set.remove(request)\n"
        "        request.end(",
    ),
    (
        "a finished request is finished again",
        "        if request.status is Status.FINISHED:\n            return\n",
        "        if request.status is Status.FINISHED:\n"
        "            request.finish_reason = finish_reason\n"
        "            return\n",
    ),
    (
        "copies to the host are forgotten where the step is empty",
        "        return SchedulerOutput()\n\n    def update(",
        "        self.running_set.swapped_out = []\n        return SchedulerOutput()\n\n    def update(",
    ),
    # Results
    (
        "results do not stop at a block that they fill",
        "request.next_event = min(block_end, request.max_num_tokens - 1)",
        "request.next_event = request.max_num_tokens - 1",
    ),
    (
        "results do not stop at the last token",
        "request.next_event = min(block_end, request.max_num_tokens - 1)",
        "request.next_event = block_end",
    ),
    (
        "a block is published that a step in flight fills",
        "self.prefix_cache.publish(request, end))",
        "self.prefix_cache.publish(request, request.num_computed_tokens))",
    ),
    (
        "a step in flight when its request was preempted publishes blocks",
        "if caching and is_running and end >= (request.num_published_blocks + 1) * size:",
        "if caching and end >= (request.num_published_blocks + 1) * size:",
    ),
    (
        "the surplus token after a stop is kept",
        "        if request.finish_reason is not None:\n            return False\n        if num_samples and",
        "        if num_samples and",
    ),
    (
        "a stop token that comes while the request waits is passed over",
        "if token_id in request.stop_token_ids:",
        "if token_id in request.stop_token_ids and request.status is Status.RUNNING:",
    ),
    (
        "a request that generates nothing never ends",
        "            if end == request.max_num_tokens:\n",
        "            if end > request.max_num_tokens:\n",
    ),
    (
        "a request gets one token more than its limit",
        "elif request.num_tokens - request.num_in_flight >= request.max_num_tokens:",
        "elif request.num_tokens - request.num_in_flight > request.max_num_tokens:",
    ),
    (
        "a request gets one token less than its limit",
        "elif request.num_tokens - request.num_in_flight >= request.max_num_tokens:",
        "elif request.num_tokens - request.num_in_flight >= request.max_num_tokens - 1:",
    ),
    # Taking in
    (
        "priority is passed over",
        'request.rank = (request.priority if self.policy == "priority" else 0, self._num_added)',
        "request.rank = (0, self._num_added)",
    ),
    (
        "priority is turned round",
        'request.rank = (request.priority if self.policy == "priority" else 0, self._num_added)',
        'request.rank = (-request.priority if self.policy == "priority" else 0, self._num_added)',
    ),
]

_RUNNING_SET = [
    (
        "an abort of a swapped request leaks host blocks",
        "            self.swap_pool.free(request.host_block_ids)\n            request.host_block_ids = []\n"
        "\n    def release",
        "            request.host_block_ids = []\n\n    def release",
    ),
    (
        "an abort leaves its copies to the host to be made",
        "self.swapped_out = [pair for pair in self.swapped_out if pair[1] not in host]",
        "pass",
    ),
    (
        "who waits for a request that leaves is lost",
        "self.wait_again(self.prefix_cache.remove_pending(request))",
        "self.prefix_cache.remove_pending(request)",
    ),
    (
        "who waits for a request that leaves waits for ever",
        "self.wait_again(self.prefix_cache.remove_pending(request))",
        "pass",
    ),
    (
        "an abort of a request held back is not noticed by the cache",
        "self.prefix_cache.forget(request)",
        "pass",
    ),
    # Swapping
    (
        "swapping in stops a block short",
        "zip(request.block_ids[num_shared : len(host)], host[num_shared:], strict=True)",
        "zip(request.block_ids[num_shared : len(host) - 1], host[num_shared:-1], strict=True)",
    ),
    (
        "swapping in mixes the blocks up",
        "zip(request.block_ids[num_shared : len(host)], host[num_shared:], strict=True)",
        "zip(request.block_ids[num_shared : len(host)], host[num_shared:][::-1], strict=True)",
    ),
    (
        "swapping in overwrites what is shared",
        "zip(request.block_ids[num_shared : len(host)], host[num_shared:], strict=True)",
        "zip(request.block_ids, host[::-1])",
    ),
    (
        "swapping in leaks the host blocks",
        "        self.swap_pool.free(host)\n",
        "",
    ),
    (
        "swapping out copies nothing",
        "self.swapped_out += zip(request.block_ids, host, strict=False)",
        "self.swapped_out += []",
    ),
    (
        "swapping out leaves out the last block, which is not full",
        "count = self._blocks_for(request.num_computed_tokens)",
        "count = request.num_computed_tokens // self.limits.block_size",
    ),
    # Preemption
    (
        "the oldest is preempted",
        "victim = self.running.pop()",
        "victim = self.running.pop(0)",
    ),
    (
        "the oldest but one is preempted",
        "victim = self.running.pop()",
        "victim = self.running.pop(min(1, len(self.running) - 1))",
    ),
    (
        "a preempted request loses its output",
        "        request.num_preemptions += 1\n",
        "        request.num_preemptions += 1\n"
        "        request.output_token_ids.clear()\n"
        "        request.num_tokens = len(request.prompt_token_ids) + request.num_in_flight\n"
        "        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)\n",
    ),
    (
        "a request that is computed again counts as computed",
        "            request.num_lost_tokens = computed\n            request.num_computed_tokens = 0\n",
        "            request.num_lost_tokens = computed\n",
    ),
    (
        "a preempted request is not queued again",
        "        self.release(request)\n        self.waiting.add(request)",
        "        self.release(request)",
    ),
    (
        "a preempted request's blocks are free while it still names them",
        "self.pool.free(request.block_ids)\n            request.block_ids = []\n",
        "self.pool.free(request.block_ids)\n",
    ),
    (
        "what a broken step copied to the host is relied on",
        "for request in list(self.waiting):",
        "for request in ():",
    ),
    (
        "after a broken step the runner is not told of its requests again",
        "        while self.running:\n            self.preempt(self.running.pop(), may_swap=False)\n",
        "",
    ),
    (
        "a block table is updated from the wrong index",
        "output.table_updates.append((request.request_id, first, tuple(request.block_ids[first:])))",
        "output.table_updates.append((request.request_id, max(0, first - 1), tuple(request.block_ids[first:])))",
    ),
    (
        "a block table misses the first of its new entries",
        "output.table_updates.append((request.request_id, first, tuple(request.block_ids[first:])))",
        "output.table_updates.append((request.request_id, first, tuple(request.block_ids[first + 1 :])))",
    ),
    (
        "the runner is not told of a request that left",
        "        self.released.append(request.request_id)\n",
        "",
    ),
    (
        "there are more seats than the limit",
        "if len(self.running) >= self.limits.max_num_seqs:",
        "if len(self.running) > self.limits.max_num_seqs:",
    ),
    (
        "a shared block is not counted as shared",
        "            for block in shared:\n                self.pool.share(block)\n",
        "            pass\n",
    ),
    (
        "cached blocks that a request shares count as room",
        "free = self.pool.num_free - sum(self.pool.num_references(block) == 0 for block in shared)",
        "free = self.pool.num_free",
    ),
    (
        "a promised block that is shared counts as published",
        "request.num_published_blocks = next(pending, len(shared))",
        "request.num_published_blocks = len(shared)",
    ),
    (
        "cached tokens are counted anew after a preemption",
        "if request.num_cached_tokens < 0:",
        "if request.num_cached_tokens <= 0:",
    ),
    (
        "tokens found in the cache are not reported",
        "request.num_cached_tokens = request.num_computed_tokens",
        "request.num_cached_tokens = 0",
    ),
    (
        "a swapped request forgets what it had computed",
        "max(request.num_computed_tokens, len(shared) * self.limits.block_size)",
        "len(shared) * self.limits.block_size",
    ),
    (
        "a request that comes back keeps what the runner knew of its table",
        "        request.status = Status.RUNNING\n        request.num_sent_blocks = 0\n",
        "        request.status = Status.RUNNING\n        request.num_sent_blocks = len(shared)\n",
    ),
    (
        "running requests are not kept in order",
        "bisect.insort(self.running, request, key=lambda other: other.rank)",
        "self.running.append(request)",
    ),
]

_LIMIT_OF_THE_CACHE = [
    (
        "log-probabilities are asked for of what is not computed",
        "most = min(most, request.most_cached_tokens // self.block_size)",
        "most = min(most, -(-request.most_cached_tokens // self.block_size))",
    ),
]

_PROMPT_TARGETS = [
    (
        "scored tokens are predicted by the token before the last",
        "return first - start - 1, self.prompt_token_ids[first : start + count + 1]",
        "return first - start - 2, self.prompt_token_ids[first : start + count + 1]",
    ),
    (
        "the last token that is scored is left out",
        "self.prompt_token_ids[first : start + count + 1]",
        "self.prompt_token_ids[first : start + count]",
    ),
    (
        "the context is scored too",
        "first = max(len(known), start + 1)",
        "first = start + 1",
    ),
]

_STEP_PLANNER = [
    (
        "a request that generates nothing samples a token",
        "samples = int(start + count == request.num_tokens < request.max_num_tokens)",
        "samples = int(start + count == request.num_tokens)",
    ),
    (
        "a request is not looked at when its block is full",
        "request.next_look = min(last + 1, request.max_num_tokens)",
        "request.next_look = min(last + 3, request.max_num_tokens)",
    ),
    (
        "a request is not looked at when it may have no more tokens",
        "request.next_look = min(last + 1, request.max_num_tokens)",
        "request.next_look = last + 1",
    ),
    (
        "a last token of a prompt by itself is sampled at",
        "if known - computed > 1 or waits or (not request.generates and known > computed):",
        "if known - computed > 1 or waits:",
    ),
    (
        "a pool that ran out takes in newcomers",
        "admits = len(self.running_set.preempted) == num_preempted",
        "admits = True",
    ),
    (
        "the token in flight is not counted against the limit",
        "if known >= request.max_num_tokens or",
        "if known > request.max_num_tokens or",
    ),
    # The step
    (
        "feedback comes from the next row",
        "feedback.append(request.last_row)",
        "feedback.append(request.last_row + 1)",
    ),
    (
        "a prompt's first token is fed back from the wrong row",
        "request.last_row = len(requests) + self._num_drafts\n",
        "request.last_row = len(requests) + self._num_drafts - 1\n",
    ),
    (
        "the budget is passed over",
        "budget = self.limits.max_num_batched_tokens\n",
        "budget = self.limits.max_num_batched_tokens + 1\n",
    ),
    (
        "decodes are not counted in the budget",
        "left = self.budget(len(requests)) - len(output.token_ids)",
        "left = self.budget(len(requests))",
    ),
    (
        "a long prompt starves the decodes behind it",
        "if known >= request.max_num_tokens or",
        "if lacking or known >= request.max_num_tokens or",
    ),
    (
        "a long prompt takes all of the step",
        "partial, limit = request, left // 2",
        "partial, limit = request, 0",
    ),
    (
        "an urgent request preempts its equals",
        "if other.rank[0] > request.rank[0]]",
        "if other.rank[0] >= request.rank[0]]",
    ),
]

_BATCH = [
    (
        "padding writes to the first block that is handed out",
        "SINK_BLOCK * self.block_size + padding % self.block_size",
        "(SINK_BLOCK + 1) * self.block_size + padding % self.block_size",
    ),
    (
        "padding writes past the sink",
        "SINK_BLOCK * self.block_size + padding % self.block_size",
        "SINK_BLOCK * self.block_size + padding",
    ),
    (
        "sequence lengths leave the newest token out",
        'fields["seq_lens"][:n] = seq_lens',
        'fields["seq_lens"][:n] = seq_lens - 1',
    ),
    (
        "positions are off by one",
        "positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)",
        "positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts) + 1, counts)",
    ),
    (
        "logits are taken from the first token of a request",
        'fields["logits_indices"][:num_rows] = indices',
        'fields["logits_indices"][:num_rows] = ends - counts',
    ),
    (
        "query_start_loc leaves out its padding",
        'fields["query_start_loc"][num_requests + 1 :] = num_tokens',
        "pass",
    ),
    (
        "rows of the step before stay in the padding",
        "            fields[name][num_requests:] = 0",
        "            pass",
    ),
    (
        "all rows have the first one's seed",
        "= store.parameters[field.name][row_owners]",
        "= store.parameters[field.name][row_owners if field.name != 'seed' else row_owners[0]]",
    ),
    (
        "a row's random numbers depend on its chunk",
        'fields["position"][:num_rows] = next_positions',
        'fields["position"][:num_rows] = counts',
    ),
    (
        "logits of drafts are those of the last token",
        "indices[places] - distances, next_positions",
        "indices[places], next_positions",
    ),
    (
        "random numbers of drafts are those of the last token",
        "next_positions[places] - distances",
        "next_positions[places]",
    ),
    (
        "a request that samples nothing has no row",
        "np.array(output.num_samples, dtype=np.int64), 1)",
        "np.array(output.num_samples, dtype=np.int64), 0)",
    ),
    (
        "tables are taken by place in the step, not by row",
        "            if name in self._own_tables:\n                fields[name][:n, :width] = known[rows, :width]",
        "            if name in self._own_tables:\n                fields[name][:n, :width] = known[:n, :width]",
    ),
    (
        "a step of the same requests has their blocks of before",
        "if has_new_blocks and name in self._own_tables:",
        "if not has_new_blocks and name in self._own_tables:",
    ),
    (
        "buffers are taken to hold a step that they do not",
        "if is_plain and held is rows:",
        "if is_plain and held is not None and len(held) == len(rows):",
    ),
    (
        "feedback of the step before stays",
        '        fields["feedback"][:total] = -1\n',
        "",
    ),
]

_REQUEST_ROWS = [
    (
        "two requests share a row",
        "row_of[admission.request_id] = row = self._free_rows.pop()",
        "row_of[admission.request_id] = row = self._free_rows[-1]",
    ),
    (
        "rows of released requests are lost",
        "self._free_rows.append(row_of.pop(request_id))",
        "row_of.pop(request_id)",
    ),
    (
        "a row keeps the temperature of the request before",
        "            self.parameters[field.name][row] = field.value(params, admission.seed, self.vocab_size)",
        "            if field.name != 'temperature' or not self.parameters['temperature'][row]:\n"
        "                self.parameters[field.name][row] = field.value(params, admission.seed, self.vocab_size)",
    ),
]


_STEP = [
    (
        "feedback from the first row is taken for none",
        "torch.where(source >= 0, fed_back, step_input.input_ids)",
        "torch.where(source > 0, fed_back, step_input.input_ids)",
    ),
]

_SWAP = [
    (
        "all layers are copied to the same bytes",
        "        start += block_bytes\n",
        "",
    ),
    (
        "the scales are not copied",
        "    for cache in caches:\n        block_bytes",
        "    for cache in caches[:-1]:\n        block_bytes",
    ),
]

_COPY_ROWS = [
    (
        "the wrong blocks are copied",
        "target[some_target] = source.index_select(0, some_source)",
        "target[some_target] = source.index_select(0, some_source.sort().values)",
    ),
]

_BLOCK_COPIES = [
    (
        "blocks are swapped in before others are swapped out",
        "((told.swapped_out, swap.swap_out), (told.swapped_in, swap.swap_in))",
        "((told.swapped_in, swap.swap_in), (told.swapped_out, swap.swap_out))",
    ),
    (
        "nothing is copied back",
        "((told.swapped_out, swap.swap_out), (told.swapped_in, swap.swap_in))",
        "((told.swapped_out, swap.swap_out),)",
    ),
    (
        "the host's blocks are taken to have a sink",
        "indices[:, 1] - 1",
        "indices[:, 1]",
    ),
]

_ENGINE_CORE = [
    (
        "an abort does not reach the scheduler",
        '                self.scheduler.finish(completion.request, "abort")\n',
        "",
    ),
]

_FORKS = [
    (
        "nothing is copied on write",
        "        if index != request.forked_index:\n            return False\n",
        "        if True:\n            return False\n",
    ),
    (
        "a child writes to what the prefix cache has as its parent's",
        "> 1 or self.pool.digest(block) is not None",
        "> 1",
    ),
    (
        "the parent does not know that others have its block",
        "parent.forked_index, parent.next_look = child.forked_index, 0",
        "pass",
    ),
    (
        "a copy is made, and the runner not told of it",
        "request.num_sent_blocks = min(request.num_sent_blocks, index)",
        "pass",
    ),
    (
        "a child counts one token too many as computed",
        "count = min(parent.num_computed_tokens, known, child.num_tokens - 1)",
        "count = min(parent.num_computed_tokens + 1, known, child.num_tokens - 1)",
    ),
    (
        "a child counts the token in flight as known",
        "count = min(parent.num_computed_tokens, known, child.num_tokens - 1)",
        "count = min(parent.num_computed_tokens, child.num_tokens - 1)",
    ),
    (
        "children name blocks that they are not counted for",
        "        for block in blocks:\n            self.pool.share(block)\n",
        "",
    ),
    (
        "the blocks of a kept request are never let go",
        "            self._take_back(request, self.kept)\n",
        "            pass\n",
    ),
    (
        "an aborted child that waits keeps what it holds",
        "            self._take_back(request, self.holders)\n",
        "            pass\n",
    ),
    (
        "who waits counts as computed what was taken back from it",
        "            request.num_computed_tokens = 0\n",
        "            pass\n",
    ),
    (
        "what a step copies may be overwritten in it",
        "        for held in (shared, block):\n            self.pool.share(held)\n"
        "        self.places.replace(request, index, shared, block)\n        self.pool.free([shared])\n"
        "        self._sources.append(shared)\n        self._targets.append(block)\n",
        "        self.places.replace(request, index, shared, block)\n        self.pool.free([shared])\n",
    ),
]

_WINDOW_POOL = [
    (
        "a window ends a key early",
        "return max(0, position - self.window + 1) // self.block_size",
        "return max(0, position - self.window + 1 + self.block_size) // self.block_size",
    ),
    (
        "a place that others need is given away",
        "        if count:\n            self._users[block] = count\n            return\n",
        "",
    ),
    (
        "a place that somebody takes again may be evicted",
        "        self._cached.pop(block, None)\n        self._users[block] = self._users.get(block, 0) + 1\n",
        "        self._users[block] = self._users.get(block, 0) + 1\n",
    ),
    (
        "a block that holds something else keeps its place",
        "            del self._cached[block]\n            self._empty.append(self._place_of.pop(block))\n",
        "            pass\n",
    ),
    (
        "a hit reaches over dropped places",
        "            there = there + 1 if block in self._place_of else 0\n",
        "            there += 1\n",
    ),
    (
        "what was computed twice is dropped twice",
        "            self.hold(holder)\n            self.drop(block, can_be_found=False)\n",
        "            self.drop(block, can_be_found=False)\n",
    ),
]

_WINDOW_PLACES = [
    (
        "places are dropped before the last query that sees them",
        "            first = window.first_seen(start)\n            for block in request.block_ids[max",
        "            first = window.first_seen(start + 2)\n            for block in request.block_ids[max",
    ),
    (
        "a released request keeps its places",
        "                window.drop(block, self._can_be_found(block))\n        request.held, request",
        "                pass\n        request.held, request",
    ),
    (
        "places are sent from where the window begins now",
        "            first = max(held.sent, held.first)\n            if first < held.end:",
        "            first = held.first + 1\n            if first < held.end:",
    ),
    (
        "a window's blocks are not copied back",
        "            told.swapped_in += [(window.place(block), there) for block, there in pairs]\n",
        "            list(pairs)\n",
    ),
    (
        "a child takes places that its parent has dropped",
        "if any(own.first < there.first for own, there in zip(held, parent.held, strict=True)):",
        "if False:",
    ),
    (
        "sink tokens stay where they were",
        "stream.num_dropped(request.num_computed_tokens) > request.num_dropped_tokens",
        "False",
    ),
]

_ACCEPTANCE = [
    (
        "a token after the first wrong draft is accepted",
        "tokens = sampled[: 1 + num_accepted]",
        "tokens = sampled[: 2 + num_accepted]",
    ),
    (
        "a draft is compared with the token after its own",
        "drafts[num_accepted] == sampled[num_accepted]:",
        "drafts[num_accepted] == sampled[num_accepted + 1]:",
    ),
    (
        "rejected tokens are published",
        "self.prefix_cache.publish(request, start + len(tokens))",
        "self.prefix_cache.publish(request, start + 1 + len(drafts))",
    ),
    (
        "computed tokens that were rejected do not roll back",
        "        request.num_computed_tokens -= 1 + len(drafts) - num_computed\n",
        "",
    ),
    (
        "tokens after a stop token are kept",
        "            tokens = tokens[: stop + 1]\n",
        "            pass\n",
    ),
    (
        "rows are taken for requests where there are drafts",
        "if len(sampled) == len(requests) else output.first_rows()",
        "if True else output.first_rows()",
    ),
]

_DRAFTS_PLANNED = [
    (
        "a token is fed back from a row of the drafts before it",
        "            request.last_row = row\n",
        "",
    ),
    (
        "drafts go beyond the last token of a request",
        "self.limits.num_draft_tokens, request.max_num_tokens - request.num_tokens)",
        "self.limits.num_draft_tokens)",
    ),
]

_DRAFTS_PREEMPTED = [
    (
        "drafts of a preempted request count as computed",
        "        request.cancel_drafts()\n",
        "",
    ),
]

_FORKS_IN_RUNNING_SET = [
    (
        "the copy is forgotten",
        "                output.copies.append((shared, block))\n",
        "",
    ),
    (
        "who makes room for a copy forgets to make it",
        "while self.forks.must_copy(request, position):",
        "if self.forks.must_copy(request, position):",
    ),
    (
        "children rely on what a broken step was to compute",
        "        while self.take_back():",
        "        while False:",
    ),
    (
        "a request that ends loses the blocks that it is to keep",
        "        if keeps_blocks:\n",
        "        if False:\n",
    ),
]

_COPY_BLOCKS = [
    (
        "the blocks of one layer alone are copied",
        "    for cache in caches:\n        blocks = cache.view",
        "    for cache in caches[:2]:\n        blocks = cache.view",
    ),
    (
        "blocks are copied the other way",
        "blocks.index_copy_(0, targets, blocks.index_select(0, sources))",
        "blocks.index_copy_(0, sources, blocks.index_select(0, targets))",
    ),
]

_BEAMS = [
    (
        "no more continuations are looked at than there are beams",
        "candidates = candidates[: self.count]",
        "candidates = candidates[: self._beam_width]",
    ),
    (
        "a beam that ended may come from any place",
        "for beam in candidates[: self._beam_width]:",
        "for beam in candidates:",
    ),
    (
        "the search ends with the first beams that end",
        "if best_possible <= self._ended[-1].score:",
        "if True:",
    ),
    (
        "scores are not divided by the length",
        "EndedBeam(beam, beam.logprob / length**self._length_penalty, reason)",
        "EndedBeam(beam, beam.logprob, reason)",
    ),
]

_BEAM_REQUESTS = [
    (
        "beams do not keep their blocks",
        "keeps_blocks=True,",
        "keeps_blocks=False,",
    ),
    (
        "beams end at an end-of-text token of their own",
        "return beam.token_ids[-1] in self._eos_token_ids",
        "return False",
    ),
]

_SAMPLER = [
    (
        "all positions have the same random number",
        "uniform(params.seed, params.position)",
        "uniform(params.seed, params.position * 0)",
    ),
    (
        "all rows have the first one's top_k",
        "sample_tokens(logits, params.temperature, params.top_k,",
        "sample_tokens(logits, params.temperature, params.top_k[:1].repeat(len(logits)),",
    ),
    (
        "top_p and min_p are mixed up",
        "params.top_p, params.min_p, random)",
        "1 - params.min_p, 1 - params.top_p, random)",
    ),
]

_KV_QUANT = [
    (
        "the scale is dropped where codes are made",
        'return codes, torch.where(finite, scale, float("nan"))',
        'return codes, torch.where(finite, torch.ones_like(scale), float("nan"))',
    ),
    (
        "the scale is dropped where codes are read",
        "return codes.float() * scale[..., None]",
        "return codes.float()",
    ),
    (
        "a row that is not finite gets a scale",
        'return codes, torch.where(finite, scale, float("nan"))',
        "return codes, scale",
    ),
]

_ATTENTION = [
    (
        "the scale of a new key is not kept",
        "scale[slots // block_size, :, slots % block_size] = new_scale",
        "pass",
    ),
]

# What each of the bugs must be caught by.
_STATE_POOL = [
    (
        "the sink of the states is handed out",
        "self._empty = list(range(num_slots, 0, -1))",
        "self._empty = list(range(num_slots - 1, -1, -1))",
    ),
    (
        "a slot is free as soon as one of its requests leaves it",
        "        if self._references[slot] == 0:\n            if slot in self._digest_of:",
        "        if self._references[slot] <= 1:\n            if slot in self._digest_of:",
    ),
    (
        "an evicted snapshot can still be found",
        "            del self._slot_of[self._digest_of.pop(slot)]\n            self._empty",
        "            self._digest_of.pop(slot)\n            self._empty",
    ),
    (
        "a snapshot outlives its block in a slot that is empty",
        "                del self._cached[slot]\n                self._empty.append(slot)\n\n    def withdraw",
        "                del self._cached[slot]\n\n    def withdraw",
    ),
]
_STATE_SLOTS = [
    (
        "a state that another request reads is written over",
        "if slot and pool.num_references(slot) == 1 and not pool.is_snapshot(slot):",
        "if slot and not pool.is_snapshot(slot):",
    ),
    (
        "a snapshot is written over",
        "if slot and pool.num_references(slot) == 1 and not pool.is_snapshot(slot):",
        "if slot and pool.num_references(slot) == 1:",
    ),
    (
        "the slot that a request has read is never given back",
        "left.append(held.slot)",
        "pass",
    ),
    (
        "the state is that after all drafts",
        "held.slot = drafted[num_accepted - 1]",
        "held.slot = drafted[-1]",
    ),
    (
        "the states of drafts that were dropped stay",
        "for slot in (first, *drafted):",
        "for slot in (first, *drafted[:num_accepted]):",
    ),
    (
        "a snapshot is published as that of the block after it",
        "index = tokens // self.block_size - 1",
        "index = tokens // self.block_size",
    ),
    (
        "the snapshot of the block before is found",
        "if self.pool.lookup(digests[end - 1]) is not None), 0)",
        "if self.pool.lookup(digests[max(0, end - 2)]) is not None), 0)",
    ),
    (
        "a fork has the state of other tokens",
        "if held.drafted or held.target or not held.slot or count != parent.num_computed_tokens:",
        "if held.drafted or held.target or not held.slot:",
    ),
    (
        "a continuation has the state after the whole prompt",
        "return [(slot, last - start)]",
        "return [(slot, end - start)]",
    ),
    (
        "the state that continuations start from is never given back",
        "            self.pool.free(held.before_last)\n",
        "",
    ),
    (
        "a request that ends leaks its slots",
        "        for slot in request.state.slots():\n            self.pool.free(slot)\n",
        "",
    ),
    (
        "a swapped-out request leaks its host slot",
        "            self.host_pool.free(request.host_slot)\n",
        "",
    ),
]
_STATES_IN_PREFIX_CACHE = [
    (
        "a state is read in the step that writes it",
        "return not self.states.are_used and self._is_filling(request, index)",
        "return self._is_filling(request, index)",
    ),
    (
        "a prefix is used without a state",
        "shorter = self.states.longest_hit(request.block_digests, shorter)",
        "pass",
    ),
]
_SUSPECTS = [
    (
        "of two requests that fail together both are the cause",
        "ended = requests if len(requests) == 1 else []",
        "ended = requests if len(requests) <= 2 else []",
    ),
    (
        "the second half of the requests of a broken step is not tried",
        "self._groups += [others, requests[half:], requests[:half]]",
        "self._groups += [others, requests[:half]]",
    ),
    (
        "a request has passed before the token at which its step broke",
        "max(self._targets.get(request, 0), computed + 1)",
        "max(self._targets.get(request, 0), computed - 1)",
    ),
    (
        "a request that was preempted meanwhile has passed at once",
        "computed = max(request.num_computed_tokens, request.num_lost_tokens)",
        "computed = request.num_computed_tokens",
    ),
    (
        "those that have passed run in the trials of others",
        "            running_set.preempt(running_set.running.pop(), may_swap=False)",
        "            break",
    ),
    (
        "other requests are admitted to a trial",
        "running_set.waiting.serve_only(group)",
        "running_set.waiting.serve_only(None)",
    ),
    (
        "the others wait for ever",
        "        self.running_set.waiting.serve_only(None)\n",
        "",
    ),
    (
        "requests that break steps only together do so for ever",
        "                request.num_unexplained_faults += 1\n",
        "                pass\n",
    ),
]
_SEARCH = [
    (
        "steps overlap while a cause is looked for",
        "            if self._in_flight:\n                return SchedulerOutput()\n",
        "",
    ),
    (
        "whoever was in a broken step ends",
        "ended = self.suspects.take([",
        "ended = [*failed]\n        self.suspects.take([",
    ),
]
_FORKS_WITHOUT_PLACES = [
    (
        "a continuation that gets no places keeps its state",
        "            self.states.release(child)\n",
        "",
    ),
]
_STATE_FIELDS = [
    (
        "states go where those of a step before went",
        "            write_slot[row, len(writes) :], write_after[row, len(writes) :] = SINK_SLOT, 0\n",
        "",
    ),
]

BUGS: dict[Bug, Checks] = {
    Bug(name, f"compiled_llm.{module}", old, new): checks
    for module, checks, texts in (
        ("scheduling.block_pool", POOL, _BLOCK_POOL),
        ("scheduling.prefix_cache", POOL, _PREFIX_CACHE),
        ("scheduling.request_queue", SCHEDULING, _REQUEST_QUEUE),
        ("scheduling.request", SCHEDULING, _REQUEST),
        ("scheduling.scheduler", SCHEDULING, _SCHEDULER),
        ("scheduling.scheduler", DRAFTS, _ACCEPTANCE),
        ("scheduling.step_planner", DRAFTS, _DRAFTS_PLANNED),
        ("scheduling.running_set", DRAFTS, _DRAFTS_PREEMPTED),
        ("scheduling.running_set", SCHEDULING, _RUNNING_SET),
        ("scheduling.step_planner", SCHEDULING, _STEP_PLANNER),
        ("scheduling.prefix_cache", SCORING, _LIMIT_OF_THE_CACHE),
        ("engine.completions", SCORING, _PROMPT_TARGETS),
        ("worker.step_buffers", TAGS, _BATCH),
        ("worker.request_rows", TAGS, _REQUEST_ROWS),
        ("step.step", TAGS, _STEP),
        ("ops.swap", TAGS, _SWAP),
        ("ops.swap", COPIES, _COPY_ROWS),
        ("worker.block_copies", ENGINE, _BLOCK_COPIES),
        ("engine.core", ABORTS, _ENGINE_CORE),
        ("scheduling.forks", FORKS, _FORKS),
        ("scheduling.window_pool", WINDOWS, _WINDOW_POOL),
        ("scheduling.window_places", WINDOWS, _WINDOW_PLACES),
        ("scheduling.state_pool", STATES, _STATE_POOL),
        ("scheduling.state_slots", STATES, _STATE_SLOTS),
        ("scheduling.prefix_cache", STATES, _STATES_IN_PREFIX_CACHE),
        ("scheduling.suspects", SUSPECTS, _SUSPECTS),
        ("scheduling.scheduler", SUSPECTS, _SEARCH),
        ("scheduling.forks", FORKS, _FORKS_WITHOUT_PLACES),
        ("worker.step_buffers", TAGS, _STATE_FIELDS),
        ("scheduling.running_set", FORKS, _FORKS_IN_RUNNING_SET),
        ("ops.swap", BLOCK_COPIES, _COPY_BLOCKS),
        ("engine.beam_search", BEAM_GROUP, _BEAMS),
        ("engine.beam_search", BEAMS, _BEAM_REQUESTS),
        ("step.sampling", SAMPLER, _SAMPLER),
        ("ops.attention.kv_quant", QUANTISED, _KV_QUANT),
        ("ops.attention.paged_attention", QUANTISED, _ATTENTION),
    )
    for name, old, new in texts
}
