"""The bugs of B16: each changes one function, which it names, and the checks named with it must see it.

A bug is one that somebody could make, or has made in another engine, and that the checks are there for. Changes that
only cost time, or that nothing can observe, are none.
"""

import ast
import copy
import dataclasses
import re
from collections.abc import Iterator


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
    """A change of one function, with which the checks must fail.

    Attributes:
        module, function: where, as "compiled_llm.scheduling.block_pool" and "BlockPool.allocate".
        old: what it changes there: an expression, or statements. The function has it once, in whatever layout; a body
            "..." stands for any.
        new: what comes in its place; empty: nothing.
    """

    name: str
    module: str
    function: str
    old: str
    new: str

    def planted(self, tree: ast.Module) -> ast.Module:
        """The module of this ``tree``, with the bug in it from now on."""
        planting = _Planting(ast.parse(self.old).body, ast.parse(self.new).body)
        function = _named(tree, self.function)
        planting.visit(function)
        where = f"{self.name}: {self.function} of {self.module}"
        assert planting.count == 1, f"{where} has this {planting.count} times, not once: {self.old}"
        ast.fix_missing_locations(function)
        return tree


def _named(tree: ast.AST, name: str) -> ast.AST:
    """The function, by the names of the classes and functions that it is in."""
    for part in name.split("."):
        (tree,) = (node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == part)
    return tree


class _Planting(ast.NodeTransformer):
    """Puts ``new`` wherever ``old`` is, and counts that."""

    def __init__(self, old: list[ast.stmt], new: list[ast.stmt]) -> None:
        self._old, self._new, self.count = old, new, 0
        is_expression = len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr)
        self._expression = old[0].value if is_expression else None
        self._dumped = ast.dump(ast.Module(old, []) if self._expression is None else self._expression)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._expression is not None:
            if type(node) is type(self._expression) and ast.dump(node) == self._dumped:
                self.count += 1
                return self._new[0].value
            return node
        for name in ("body", "orelse"):
            statements, size = getattr(node, name, None), len(self._old)
            for start in range(len(statements) + 1 - size if isinstance(statements, list) else 0):
                found = statements[start : start + size]
                if all(map(_is_alike, found, self._old)):
                    self.count += 1
                    new = [_with_body_of(found[0], statement) for statement in self._new]
                    setattr(node, name, [*statements[:start], *new, *statements[start + size :]] or [ast.Pass()])
                    break
        return node


def _is_alike(found: ast.stmt, old: ast.stmt) -> bool:
    return type(found) is type(old) and ast.dump(found) == ast.dump(_with_body_of(found, old))


def _with_body_of(found: ast.stmt, statement: ast.stmt) -> ast.stmt:
    """``statement``, with the body of ``found`` if its own is "..."."""
    if ast.dump(ast.Module(getattr(statement, "body", []), [])) != ast.dump(ast.parse("...")):
        return statement
    changed = copy.copy(statement)
    changed.body = getattr(found, "body", [])
    return changed


POOL = Checks(
    (
        "tests/battery/test_block_pool.py::test_random_operations",
        "tests/scheduling/test_block_pool.py",
        "tests/scheduling/test_prefix_cache.py",
        "tests/scheduling/test_adapter_slots.py",
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
        "tests/scheduling/test_masks.py",
        "tests/battery/test_planted_bugs_checks.py",
    ),
    load_torch=False,
)
FORKS = Checks(
    (
        "tests/battery/test_schedules.py::test_random_schedules",
        "tests/scheduling/test_forks.py",
        "tests/scheduling/test_window_pool.py",
    ),
    load_torch=False,
)
WINDOWS = Checks(
    ("tests/scheduling/test_window_pool.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
STATES = Checks(
    ("tests/scheduling/test_state_pool.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
TIERS = Checks(
    ("tests/scheduling/test_tiers.py", "tests/battery/test_schedules.py::test_random_schedules_with_tiers"),
    load_torch=False,
)
COMPRESSED_HEADS = Checks(
    ("tests/e2e/test_compressed_weights.py::test_medusa_heads_are_compressed_beside_a_model_that_is",), load_torch=True
)
COMPRESSED = Checks(("tests/ops/linear/test_compressed_linear.py",), load_torch=True)
WHOLE = Checks(("tests/e2e/test_lora_whole.py",), load_torch=True)
SUSPECTS = Checks(
    ("tests/scheduling/test_suspects.py", "tests/battery/test_schedules.py::test_random_schedules"), load_torch=False
)
SCORING = Checks(
    (
        "tests/scheduling/test_scheduler_prompts_alone.py",
        "tests/e2e/test_scoring.py::test_only_what_is_asked_for_is_computed",
        "tests/e2e/test_scoring.py::test_equal_to_the_bit_to_generating[bfloat16 with an int8 cache]",
    ),
    load_torch=True,
)
DRAFTS = Checks(
    (
        "tests/scheduling/test_drafts.py",
        "tests/scheduling/test_masks.py",
        "tests/battery/test_schedules.py::test_random_schedules",
    ),
    load_torch=False,
)
ROUTING = Checks(("tests/routing/test_router.py", "tests/routing/test_prefixes.py"), load_torch=False)
REPLICAS = Checks(("tests/server/test_replicas.py", "tests/server/test_roles.py"), load_torch=True)
TAKEN = Checks(("tests/server/test_take_over.py", "tests/server/test_roles.py"), load_torch=True)
MASKS = Checks(("tests/scheduling/test_masks.py",), load_torch=False)
DRAFTED = Checks(
    (
        "tests/worker/test_sampling_stage.py",
        "tests/constraints/test_token_masks.py",
        "tests/battery/test_speculation.py::test_the_same_as_without[small-ngram]",
    ),
    load_torch=True,
)
ACCOUNT = Checks(("tests/scheduling/test_draft_account.py",), load_torch=False)
BUCKETS = Checks(("tests/scheduling/test_bucket.py",), load_torch=False)
COSTS = Checks(("tests/scheduling/test_decode_costs.py",), load_torch=False)
PLANNER = Checks(("tests/scheduling/test_draft_planner.py",), load_torch=False)
TOGETHER = Checks(("tests/scheduling/test_draft_planner_together.py",), load_torch=False)
LENGTHS = Checks(("tests/scheduling/test_draft_lengths.py",), load_torch=False)
GAINS = Checks(("tests/scheduling/test_draft_gains.py",), load_torch=False)
DRAFTERS = Checks(("tests/drafting/test_suffix.py",), load_torch=False)
LOOKAHEAD = Checks(("tests/drafting/test_lookahead.py", "tests/scheduling/test_drafts.py"), load_torch=False)
LAYER_SKIP = Checks(("tests/e2e/test_layer_skip.py",), load_torch=True)
TREES = Checks(("tests/scheduling/test_draft_trees.py", "tests/e2e/test_draft_trees.py"), load_torch=True)
NETWORK_TREES = Checks(("tests/worker/test_draft_trees.py", "tests/e2e/test_network_trees.py"), load_torch=True)
LATENT_TREES = Checks(("tests/ops/attention/test_latent_trees.py",), load_torch=True)
MOVED_KEYS = Checks(("tests/ops/attention/test_move_keys.py",), load_torch=True)
DRAFT_BUFFERS = Checks(("tests/worker/test_draft_buffers.py", "tests/e2e/test_draft_model.py"), load_torch=True)
NETWORKS = Checks(
    ("tests/worker/test_draft_coverage.py", "tests/scheduling/test_worker_drafts.py", "tests/e2e/test_draft_model.py"),
    load_torch=True,
)
HEADS = Checks(
    ("tests/worker/test_head_coverage.py", "tests/step/test_head_drafting.py", "tests/e2e/test_draft_heads.py"),
    load_torch=True,
)
ROWS_BELOW = Checks(("tests/step/test_drafting.py",), load_torch=True)
PIECES = Checks(("tests/compiling/test_native_pieces.py",), load_torch=True)
TAGS = Checks(("tests/battery/test_tags.py", "tests/worker/test_step_buffers.py"), load_torch=True)
LAST_ROWS = Checks(("tests/models/test_last_rows.py", "tests/e2e/test_last_rows.py"), load_torch=True)
LAST_LAYER = Checks(
    (
        "tests/models/test_last_layer.py",
        "tests/e2e/test_mtp.py::test_drafts_are_those_of_steps_that_compute_the_last_layer_of_all_tokens",
        "tests/e2e/test_mtp.py::test_experts_shards_and_adapters_leave_the_last_layer_in_the_step",
    ),
    load_torch=True,
)
KEYS = Checks(("tests/worker/test_tier_files.py",), load_torch=True)
POOL_PAGES = Checks(("tests/worker/test_pool_pages.py",), load_torch=True)
COPIES = Checks(("tests/ops/test_swap.py::test_round_trip[mixed-(2, 3, 7)-cpu]",), load_torch=True)
BLOCK_COPIES = Checks(("tests/ops/test_swap.py::test_copies_within_the_pool",), load_torch=True)
BEAM_GROUP = Checks(("tests/engine/test_beam_search.py",), load_torch=True)
BEAMS = Checks(
    (
        "tests/e2e/test_beam_search.py::test_equal_to_transformers[more beams than seats]",
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
SHARED_ROWS = Checks(("tests/worker/test_shared_rows.py",), load_torch=True)
ROLES_OF_RANKS = Checks(("tests/e2e/test_roles_of_ranks.py",), load_torch=True)
ABORTS = Checks(("tests/e2e/test_engine.py::test_a_stream_closed_early_aborts_its_request",), load_torch=True)
NOISE = Checks(("tests/ops/sampling/test_noise.py",), load_torch=True)
SAMPLER = Checks(("tests/step/test_sampling.py",), load_torch=True)
RANK_LOGITS = Checks(("tests/step/test_rank_logits.py",), load_torch=True)
OFFLOAD = Checks(("tests/e2e/test_offloaded_weights.py::test_the_same_answers_at_both_ends[plain]",), load_torch=True)
FETCH = Checks(("tests/ops/test_fetch.py",), load_torch=True)
RECORDING = Checks(("tests/tuning/test_draft_recording.py", "tests/tuning/test_draft_replay.py"), load_torch=True)
CALIBRATION = Checks(("tests/worker/test_calibration.py",), load_torch=True)
ROUNDING = Checks(
    (
        "tests/ops/linear/test_searched_scales.py",
        "tests/ops/linear/test_quantize_rows.py",
        "tests/ops/linear/test_quantized_linear_a8.py::test_ops",
    ),
    load_torch=True,
)
QUANTISED = Checks(
    (
        "tests/ops/attention/test_kv_quant.py",
        "tests/ops/attention/test_paged_attention.py::test_kernel[mixed-gqa4-h64-int8]",
    ),
    load_torch=True,
)
ADAPTERS = Checks(("tests/battery/test_adapters.py",), load_torch=True)
ADAPTER_SLOTS = Checks(("tests/scheduling/test_adapter_slots.py",), load_torch=False)
HOST_ADAPTERS = Checks(("tests/adapters/test_host_adapters.py",), load_torch=True)

# Of modules: the checks that must see their bugs, and these, each as its name and "function: old => new".
_PLANTED = """
    scheduling.block_pool, POOL
        the sink is handed out
            BlockPool.__init__: range(num_blocks, SINK_BLOCK, -1) => range(num_blocks - 1, SINK_BLOCK - 1, -1)
        one block of the pool is never handed out
            BlockPool.__init__: range(num_blocks, SINK_BLOCK, -1) => range(num_blocks - 1, SINK_BLOCK, -1)
        one block more than there are is promised
            BlockPool.allocate: len(self._empty) + len(self._cached) => len(self._empty) + len(self._cached) + 1
        a double free goes unnoticed
            BlockPool.free: assert count >= 0, f'block {block} is not in use' => count = max(0, count)
        a second table that shares a block is not counted
            BlockPool.share: self._references[block] += 1 => self._references[block] = 1
        a cached block that is used again may still be evicted
            BlockPool.share: del self._cached[block] =>
        a shared block is free when its first user leaves
            BlockPool.free: count == 0 => count <= 1
        parents are evicted before their children
            BlockPool.free: reversed(blocks) => blocks
        the most recently used is evicted
            BlockPool._evict: False => True
        an evicted block can still be found
            BlockPool._evict: del self._digest_of[block], self._block_of[digest] => del self._digest_of[block]
        a published block is given out as if it was empty
            BlockPool.free: block in self._digest_of => block in self._digest_of and self._empty
        digests leave the parent out
            block_digest: parent + array('q', token_ids).tobytes() => array('q', token_ids).tobytes()
    scheduling.prefix_cache, POOL
        a hit may be the whole prompt
            PrefixCache._most_found: request.num_tokens - 1 => request.num_tokens
        digests leave the salt out
            PrefixCache._digests: root_digest(*self._facts, request.cache_salt, *own) => root_digest(*self._facts, *own)
        digests leave the model out
            PrefixCache._digests: root_digest(*self._facts, request.cache_salt, *own) =>
                root_digest(request.cache_salt, *own)
        digests leave the adapter out
            PrefixCache._digests: root_digest(*self._facts, request.cache_salt, *own) =>
                root_digest(*self._facts, request.cache_salt)
        a block is published before it is full
            PrefixCache.publish: num_tokens // self.block_size => -(-num_tokens // self.block_size)
        a promised block is read before it is filled
            PrefixCache._is_filling: index + 1 => index
        a table keeps its own copy of a block that was published before
            PrefixCache.publish: request.block_ids[index] = holder =>
        the runner is not told that a block was exchanged
            PrefixCache.publish: request.num_sent_blocks, request.next_look = (min(request.num_sent_blocks, index), 0)
                =>
        promises of a request that leaves are not withdrawn
            PrefixCache.remove_pending: self._pending.get(digest, (None,))[0] is request => False
        a promise of somebody else is withdrawn
            PrefixCache.remove_pending: self._pending.get(digest, (None,))[0] is request => digest in self._pending
        who is forgotten is woken all the same
            PrefixCache.forget: self._held_back[digest].remove(request) =>
    scheduling.request_queue, SCHEDULING
        the last by rank is served first
            RequestQueue.first: request.rank < best.rank => request.rank > best.rank
        a request that left the queue is served
            RequestQueue.first: heap and self._entry_of.get(heap[0][2]) != heap[0][1] => False
        a request is served that lacks more than fits
            RequestQueue.first: most_tokens is None or _lacking(request) <= most_tokens => True
        cleaning up loses a request
            RequestQueue.remove: heap => heap[1:]
    scheduling.request, SCHEDULING
        output tokens are not computed again after a preemption
            Request.tokens: self.prompt_token_ids[start:end] + self.output_token_ids[:max(0, end - prompt_len)]
                => self.prompt_token_ids[start:end]
    scheduling.scheduler, SCHEDULING
        an abort leaks blocks
            Scheduler.finish: self.running_set.remove(request)
                => self.running.remove(request) if finish_reason == 'abort' and request.status is Status.RUNNING
                else self.running_set.remove(request)
        a finished request is finished again
            Scheduler.finish: return => request.finish_reason = finish_reason; return
        copies to the host are forgotten where the step is empty
            Scheduler.schedule:
                not self.in_flight and self.has_unfinished_requests() => not (
                    setattr(self.running_set, 'swapped_out', []) or self.in_flight
                ) and self.has_unfinished_requests()
        results do not stop at a block that they fill
            Scheduler._enter: min(block_end, request.max_num_tokens - 1) => request.max_num_tokens - 1
        results do not stop at the last token
            Scheduler._enter: min(block_end, request.max_num_tokens - 1) => block_end
        a block is published that a step in flight fills
            Scheduler._enter: self.prefix_cache.publish(request, end)
                => self.prefix_cache.publish(request, request.num_computed_tokens)
        a step in flight when its request was preempted publishes blocks
            Scheduler._enter: caching and is_running and (end >= (request.num_published_blocks + 1) * size)
                => caching and end >= (request.num_published_blocks + 1) * size
        the surplus token after a stop is kept
            Scheduler._enter: if request.finish_reason is not None: return False =>
        a stop token that comes while the request waits is passed over
            Scheduler._enter: token_id in request.stop_token_ids
                => token_id in request.stop_token_ids and request.status is Status.RUNNING
        a request that generates nothing never ends
            Scheduler._enter: if end == request.max_num_tokens: self.finish(request, 'length')
                => if end > request.max_num_tokens: self.finish(request, 'length')
        a request gets one token more than its limit
            Scheduler._enter: request.num_tokens - request.num_in_flight >= request.max_num_tokens
                => request.num_tokens - request.num_in_flight > request.max_num_tokens
        a request gets one token less than its limit
            Scheduler._enter: request.num_tokens - request.num_in_flight >= request.max_num_tokens
                => request.num_tokens - request.num_in_flight >= request.max_num_tokens - 1
        priority is passed over
            Scheduler.add: request.priority if self.policy == 'priority' else 0 => 0
        priority is turned round
            Scheduler.add: request.priority => -request.priority
    scheduling.scheduler, DRAFTS
        a token after the first wrong draft is accepted
            Scheduler._accept: 1 + num_accepted => 2 + num_accepted
        a draft is compared with the token after its own
            Scheduler._accept: sampled[num_accepted] => sampled[num_accepted + 1]
        rejected tokens are published
            Scheduler._accept: min(start + len(tokens), start + in_place) => start + 1 + len(drafts)
        computed tokens that were rejected do not roll back
            Scheduler._accept: request.num_computed_tokens -= 1 + len(drafts) - num_computed =>
        tokens after a stop token are kept
            Scheduler._accept: tokens = tokens[:stop + 1] =>
        rows are taken for requests where there are drafts
            Scheduler.update: len(sampled) == len(requests) => True
    scheduling.step_planner, DRAFTS
        a token is fed back from a row of the drafts before it
            _with_drafts: request.last_row = row =>
    scheduling.step_masks, MASKS
        masks of drafts count them as tokens of the output
            add_masks: request.num_tokens - 1 - num_drafts - len(request.prompt_token_ids)
                => request.num_tokens - 1 - len(request.prompt_token_ids)
        a mask is that of the token after
            add_masks: request.num_tokens - 1 - num_drafts - len(request.prompt_token_ids)
                => request.num_tokens - num_drafts - len(request.prompt_token_ids)
    scheduling.draft_planner, DRAFTS
        drafts go beyond the last token of a request
            DraftPlanner._most: min(self.limits.num_draft_tokens, request.max_num_tokens - request.num_tokens - 1)
                => self.limits.num_draft_tokens
    scheduling.draft_planner, LENGTHS
        a network reads a prompt for the last tokens of a request
            DraftPlanner._choose: reads and self._ends_soon() => False
    scheduling.draft_planner, PLANNER
        a network goes on behind requests that have ended
            DraftPlanner._choose: any(request.takes_drafts for request in self.running_set.running) => True
        a rest that others have ended is as long as it was to be
            DraftPlanner._end_rest: (began, count - self._num_rests) if count > self._num_rests else None
                => (began, count)
        a network whose drafts were verified has to read its prompt again
            DraftPlanner._choose: self._drafts_next or self._drafted_before => self._drafts_next
        steps that do not rest after all keep their shares
            DraftPlanner._end_rest: self.account.end_rest(self._kind, self._num_rests) => ...
        what steps that rest took is not known
            DraftPlanner.propose: self.account.enter_rest(self._kind, count, seconds) => ...
        a prompt counts as a step that rests
            DraftPlanner.record: self._drop_rest() => ...
        steps of a pipeline are as long as the time between two of them
            DraftPlanner.propose: (started - began) / count * self.limits.steps_at_once => (started - began) / count
        requests of few tokens learn nothing
            DraftPlanner._drop_rest: self.account.pass_by(self._kind, self._rest[1]) => ...
        a failed step is part of a rest
            DraftPlanner.start_over: self._drop_rest() => ...
        empty plans rest
            DraftPlanner.plan_next: self._num_rests += 1 => ...
        tokens of short prompts are no tokens of a step that decodes
            DraftPlanner.record: num_tokens - num_requests => num_drafts
    scheduling.draft_planner, TOGETHER
        what requests gain on average is gained though the last one gains nothing
            DraftPlanner._shared: self.costs.shared(num_requests, self._kind[1]) => 0.0
        a request that gains nothing takes all from the others
            DraftPlanner._shared: min(self.costs.shared(num_requests, self._kind[1]), 1.0 - LEAST_OF_MEAN) => 1.0
        where others wait the slowest request decides
            DraftPlanner._end_together: self._num_waiting() => False
        where requests come and go the slowest request decides
            DraftPlanner.come: [len(request.output_token_ids) for request in self.running_set.running] => []
        what others gained more than the slowest is lost when that ends
            DraftPlanner.end: self._shared(max(2, len(running))) * self._least_gained() => 0.0
        what a network takes does not count in the choice of drafts
            DraftPlanner._lengths: self.account.network(self._kind) => 0.0
        drafts of requests that are behind come no sooner
            DraftPlanner._lengths: [of_each[request] for request in asked] => []
    scheduling.draft_gains, GAINS
        what was gained counts in each step again
            Gains.take_least: self._least = least => ...
        what the fastest has gained counts
            Gains.take_least: min(self._gained.get(request, 0) for request in running)
                => max(self._gained.get(request, 0) for request in running)
        what was gained beside others counts alone
            Gains.accept: self.start_over() => ...
        requests have come together once one came by itself
            Gains.come: self.came_together and max(num_output_tokens, default=0) <= MOST_BEHIND
                => max(num_output_tokens, default=0) <= MOST_BEHIND
        what one who was held back has not gained is taken from all
            Gains.take_least: more < 0 => False
        a server never has a batch again
            Gains.end: self.came_together = True => ...
        a token of the fastest request is worth most
            weights: (count + _SOME_MORE) ** -_POWER => (count + _SOME_MORE) ** _POWER
    scheduling.decode_costs, COSTS
        all requests take no time of their own
            DecodeCosts.shared: num_requests * own / all_of_them => 0.0
        steps with drafts and plain ones have one ratio
            _Curves.key: num_drafts.bit_length() => 0
        steps of all numbers of requests have one ratio
            _Curves.key: (num_requests - 1).bit_length() => 0
        a step of its own size is expected to take what its requests take
            _Curves.seconds: num_requests + num_drafts => num_requests
        the first step of so many drafts, which runs cold, keeps others away
            DecodeCosts.record: start.first_is_cold and drafts and drafts not in of_size => False
        what is known of few steps with drafts is kept as long as what is known of many
            DecodeCosts.record: max(1.0, _FEW_STEPS / number) if other else 1.0 => 1.0
        what is known of few steps without drafts is forgotten soon
            DecodeCosts.record: max(1.0, _FEW_STEPS / number) if other else 1.0 => max(1.0, _FEW_STEPS / number)
    scheduling.costs, ACCOUNT
        what was slow once counts as much as ever
            left_of: max(min(count, _LEAST_LEFT), count * _LEFT_OF_COUNT**num_passed) => count
    scheduling.draft_account, ACCOUNT
        the first plain steps behind drafts are measured
            _Steps.enter_together: self.num_before < SETTLED => False
        the first plain steps behind prompts are measured
            DraftAccount.unsettle: steps.num_before = 0 => ...
        the first step behind a prompt counts against drafts
            _Steps.enter: not step.is_first => True
        where all steps follow prompts drafts cost nothing
            _Steps.enter: key not in self.others => False
        what paid for no number of requests is tried as long for each
            DraftAccount._start: steps.share < SHARE => False
        a pause of the machine counts in full
            _Steps.enter_together: min(max(seconds, self.plain / _MOST_TIMES), most) => seconds
        what drafts cost counts as saved
            _Steps.enter: step.gained * self.plain - max(0.0, seconds - self.plain)
                => step.gained * self.plain + max(0.0, seconds - self.plain)
        looks cost nothing
            _Steps.enter: saved -= self.look => ...
        a network's time counts as saved
            _Steps.enter: saved -= self.network => saved += self.network
        reading a prompt costs nothing
            _Steps.add: self.with_reading + saved - reading => self.with_reading + saved
        savings have no bound
            _Steps.add: min(MOST, self.balance + saved) => self.balance + saved
        plain steps do not refill the account
            _Steps.enter_plain: self.add(self.share) => ...
        a method that never pays loses as much after each try
            _Steps.add: SHARE if self.was_full else max(LEAST_SHARE, self.share / 2) => SHARE
        after other steps no plain ones are measured
            DraftAccount.looks: steps.due => False
        steps of all kinds have one account
            DraftAccount.enter: self._steps.get(step.kind) => next(iter(self._steps.values()), None)
    scheduling.draft_planner, MASKS
        drafts that a mask forbids are verified
            DraftPlanner._allowed: drafts[:len(request.draft_masks)] => drafts
    constraints.token_masks, DRAFTED
        masks of drafts do not count the drafts before them
            TokenMask.after_drafts: tokens.append(draft) => ...
    step.logits, DRAFTED
        penalties do not see the drafts before a token
            process_logits: inputs.drafts is not None => False
        rejected drafts count for penalties
            due_rows: inputs.drafts is None => True
        drafts of the request before count for penalties
            rows_before: before >= drafts.first[:, None] => before >= 0
    worker.sampling_stage, DRAFTED
        masks of drafts are those of the first token
            _LogitsBuffers.fill: first_rows[index] + place => first_rows[index]
    drafting.suffix, DRAFTERS
        outputs of one salt are drafted under another
            SuffixDrafter._proposal: self._outputs.of(request.cache_salt) => self._outputs.of('')
        a run that goes on stays where it was
            Run.moved: place + count => place
        outputs are kept for ever
            RecentOutputs._drop_oldest: del texts[number] =>
    drafting.lookahead, LOOKAHEAD
        guesses stay where they were when tokens came
            _Lookahead.chain: first + place < len(self.guesses) => place < len(self.guesses)
        the draft that was wrong is guessed again
            _Lookahead.read: sampled[place + 1] => drafts[place]
        n-grams of iterations take the place of the text's
            _Lookahead.chain: of_text.get(last) or of_guesses.get(last) => of_guesses.get(last) or of_text.get(last)
        n-grams are kept for ever
            _put: len(pool) > MOST_NGRAMS => False
        an iteration goes on from a token that was not guessed
            _Lookahead.read: run and run[-1] == token => run
    scheduling.scheduler, LOOKAHEAD
        what was sampled is taken for that of the position before
            Scheduler._accept: start + 1 => start
    step.drafting, LAYER_SKIP
        keys of drafts go to the slot of the token before
            layer_skip_function.draft: position[:, None] => position[:, None] - 1
        keys of drafts in windows go to the places of other blocks
            layer_skip_function.draft: slots[1:] => slots[:1]
        layers with a state draft
            num_draft_layers: states and states[0] < count => False
    scheduling.scheduler, TREES
        of a tree the first drafts count, not those of a path
            Scheduler._accept: tuple(sampled[row] for row in path) => sampled[:len(path)]
    scheduling.running_set, TREES
        keys of accepted drafts stay where they are
            RunningSet.move_keys: row == place => True
        keys of accepted drafts go a slot too far
            RunningSet.move_keys: divmod(start + place, size) => divmod(start + place + 1, size)
    scheduling.draft_trees, TREES
        rows of a tree stand where their slots are
            tree_depths: depths[parent] + 1 => len(depths)
        acceptance follows the first child
            DraftTree._child: self.token_ids[child - 1] == token_id => True
    worker.draft_trees, TREES
        a row of a tree sees its sibling
            tree_rows: masks[parent] | 1 << row => masks[parent] | 1 << row | (1 << row - 1 if row > 1 else 0)
        a row of a tree does not see its parent
            tree_rows: masks[parent] | 1 << row => 1 | 1 << row
    ops.attention.move_keys, MOVED_KEYS
        values stay where they are
            move_keys_reference: (k_cache, v_cache) => (k_cache,)
        scales stay where they are
            move_keys_reference: (k_scale, v_scale) => ()
        keys stay where they are
            move_keys_reference: (k_cache, v_cache) => (v_cache,)
    ops.attention.latent_attention, LATENT_TREES
        a tree over latents sees its siblings
            latent_attention_reference: ancestors[start] != 0 => False
    models.layers.latent_attention, TREES
        rows of trees over latents see all before them
            latent_attention: rotary_latent_attention(*new, *turn, keys_of(spec, cache, step), spec, step.ancestors)
                => rotary_latent_attention(*new, *turn, keys_of(spec, cache, step), spec)
    worker.draft_trees, NETWORK_TREES
        features of accepted drafts stay where they are
            move_accepted: rows[target] = rows[source] => ...
    step.tree_drafting, NETWORK_TREES
        on the device a path goes on with a draft of another node
            accepted_path: known.parents == row[:, None] => known.parents >= 0
        on the device a path follows the first child
            accepted_path: known.token_ids == sampled[:, None] => known.token_ids >= 0
        Medusa heads read the row that a chain has there
            draft_medusa_tree_function: known.token_row + path[:, -1] => known.token_row + accepted
        all Medusa heads have the noise of the first
            draft_medusa_tree_function: known.position + accepted + number + 1 => known.position + accepted + 1
        a node has the ancestors of its sibling
            draft_tree_function: torch.gather(masks[:, count - width :], 1, before) => masks[:, count - width :]
        a node does not see its parent
            draft_tree_function: masks_before | (1 << own) => masks_before[:, :1] & 1 | (1 << own)
        the hidden state of a parent is that of its sibling
            draft_tree_function: torch.gather(fed_back, 1, before[:, :, None].expand(-1, -1, fed_back.shape[2]))
                => fed_back
        nodes have the noise of the level before
            _of_nodes: sampling.position + level => sampling.position + level - 1
        nodes stand where their slots are
            _step_of_tree: base[:, None] + depths => places
        features of a path are those of the rows that a chain has there
            _path_rows: known.position[owner] - 1 + row => known.position[owner] - 1 + place
        tokens of a path are those of the rows that a chain has there
            _path_rows: known.first_row[owner] + row => known.first_row[owner] + place
    step.drafting, NETWORKS
        a network goes on from the token after the last right draft but one
            draft_model_function: known.first_row + accepted => known.first_row
        a draft is compared with itself on the device
            num_accepted: known.token_ids[:, place + 1] => known.token_ids[:, place]
    step.head_drafting, HEADS
        a feature is that of the token after
            _kept_at: slots % size => (slots + 1) % size
        hidden states are taken for features
            _features_at: made_of(weights, rows, model_config) => rows[:, : rows.shape[1] // 3]
        drafts that were right are not computed anew
            _accepted_rows: ends, owner, place = rows_below(counts, number) =>
                ends, owner, place = rows_below(counts, number); place = accepted[owner]
        a row stands at the token after its own
            _accepted_rows: known.position[owner] - 1 + place => known.position[owner] + place
        a head drafts after the first row of a step
            draft_head_function: (ends - 1).clamp(min=0) => (ends - 1 - accepted).clamp(min=0)
        Medusa heads read the row of the first token
            draft_medusa_function: known.token_row + accepted => known.token_row
        all drafts have the noise of the first
            draft_head_function: features, position = feed_back(weights, rows, model_config), position + 1
                => features, position = feed_back(weights, rows, model_config), position
    step.drafting, ROWS_BELOW
        rows of a request begin one too late
            rows_below: ends[None, :] <= numbers[:, None] => ends[None, :] < numbers[:, None]
    compiling.native_pieces, PIECES
        tensors of pieces of one graph have the same names
            inlined: f"p{number}_{made}" => made
    worker.head_coverage, HEADS
        a block that another token follows is taken as it is
            HeadCoverage.begin_step: ends[self._followers[blocks] != self._token_ids[row, ends]] => ends[:0]
        followers stay behind when blocks are copied
            HeadCoverage._move_blocks: self._move(output, self._followers, self._followers_on_host) =>
        a row takes its own token for the one that follows
            HeadCoverage.tokens: super().tokens(name, row, start + 1, end + 1) => super().tokens(name, row, start, end)
    worker.head_stage, HEADS
        features are not kept while nothing is drafted
            HeadStage.run: self._functions[self._features_name(bucket)](*self._feature_arguments(bucket)) =>
                output.drafts_next and self._functions[self._features_name(bucket)](*self._feature_arguments(bucket))
    models.draft_heads.taps, HEADS
        inputs of layers that a head reads are written over each other
            KeptTaps._note: self._num_columns += x.shape[1] => self._num_columns = 0
    worker.draft_coverage, HEADS
        a block that another token follows is taken as it is if nothing was drafted when it was found
            DraftCoverage._enter: self._begin(name, start) => self._begin(name, start * output.drafts_next)
    worker.draft_coverage, NETWORKS
        a prefix that the drafter lacks is taken for computed
            DraftCoverage.num_covered: first_lacking < needed => first_lacking < 0
        what was forgotten behind many steps without drafts is relied on
            DraftCoverage._empty_all: self._first_lacking[:] = 0 => ...
        a step without the drafter leaves no gap
            DraftCoverage.lack_from_here: self._first_lacking[blocks[1:]] = 0 =>
        a gap ends where the step does
            DraftCoverage.lack_from_here: self._first_lacking[blocks[1:]] = 0 =>
                self._first_lacking[blocks[1 : -(-(rest + output.num_scheduled_tokens[place]) // self._size)]] = 0
        what the drafter lacks of a block is lost on the way to the host
            DraftCoverage._move: move(output.swapped_out, device, host) =>
        what the drafter lacks of a copied block is not known
            DraftCoverage._move: move(output.copies, device, device) =>
        a block that another request had is taken for computed
            DraftCoverage._enter_tables: blocks[whole] if len(blocks) == whole + 1 else list(blocks[whole:]) => []
        a token that the device alone knows is taken for told
            DraftCoverage.has_all_of: max(output.feedback) < 0 => True
        one request of which a network has all is taken for all requests
            DraftCoverage.has_all_of: self._complete.issuperset(output.request_ids) => bool(self._complete)
        a request that takes the blocks of another is taken to lack nothing
            DraftCoverage._enter_tables: self._complete.discard(name) =>
        tokens of the first request are entered for all
            DraftCoverage.begin_step: rows[place] => rows[0]
        tokens of a request that ran before are taken for known
            DraftCoverage._forget: self._num_known.pop(name, None) =>
    scheduling.worker_drafts, NETWORKS
        a request that runs again is taken to be known
            WorkerDrafts.admit: self._num_told.pop(admission.request_id, None) =>
    worker.draft_stage, NETWORKS
        prompts are not computed by the drafter
            NetworkStage._catch_up: np.flatnonzero(~found).tolist() => ()
    worker.draft_buffers, DRAFT_BUFFERS
        drafts go on behind the last block of a request
            DraftBuffers._fill_tables: np.minimum(num_blocks * self._limits.block_size, self._limits.max_model_len)
                => self._limits.max_model_len
        drafts have the rows of the requests before
            DraftBuffers._fill_counts: (logits_rows.cumsum() - logits_rows)[places] => places
        drafts are behind the tokens of the step before
            DraftBuffers.fill: held is None or held.counts != counts => held is None
        a draft's keys are written to blocks that the request had before
            DraftBuffers.fill: held is None or held.num_changes != store.num_changes or held.width < width
                => held is None
        drafts are sampled with the parameters of requests that ended
            DraftBuffers.fill: held.rows is not rows or held.places != of_places
                => len(held.rows) != len(rows) or held.places != of_places
    scheduling.running_set, DRAFTS
        drafts of a preempted request count as computed
            RunningSet.preempt: request.cancel_drafts() =>
    scheduling.running_set, SCHEDULING
        an abort of a swapped request leaks host blocks
            RunningSet.remove: self.swap_pool.free(request.host_block_ids) =>
        an abort leaves its copies to the host to be made
            RunningSet.remove: self.swapped_out = [pair for pair in self.swapped_out if pair[1] not in host] =>
        who waits for a request that leaves is lost
            RunningSet.release: self.wait_again(self.prefix_cache.remove_pending(request))
                => self.prefix_cache.remove_pending(request)
        who waits for a request that leaves waits for ever
            RunningSet.release: self.wait_again(self.prefix_cache.remove_pending(request)) =>
        an abort of a request held back is not noticed by the cache
            RunningSet.remove: self.prefix_cache.forget(request) =>
        swapping in stops a block short
            RunningSet._swap_in: zip(request.block_ids[num_shared:len(host)], host[num_shared:], strict=True)
                => zip(request.block_ids[num_shared:len(host) - 1], host[num_shared:-1], strict=True)
        swapping in mixes the blocks up
            RunningSet._swap_in: host[num_shared:] => host[num_shared:][::-1]
        swapping in overwrites what is shared
            RunningSet._swap_in: zip(request.block_ids[num_shared:len(host)], host[num_shared:], strict=True)
                => zip(request.block_ids, host[::-1])
        swapping in leaks the host blocks
            RunningSet._swap_in: self.swap_pool.free(host) =>
        swapping out copies nothing
            RunningSet.preempt: zip(request.block_ids, host, strict=False) => []
        swapping out leaves out the last block, which is not full
            RunningSet._swap_space: self._blocks_for(request.num_computed_tokens)
                => request.num_computed_tokens // self.limits.block_size
        the oldest is preempted
            RunningSet.make_room: self.running.pop() => self.running.pop(0)
        the oldest but one is preempted
            RunningSet.make_room: self.running.pop() => self.running.pop(min(1, len(self.running) - 1))
        a preempted request loses its output
            RunningSet.preempt: request.num_preemptions += 1
                => request.num_preemptions += 1; request.output_token_ids.clear();
                request.num_tokens = len(request.prompt_token_ids) + request.num_in_flight;
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        a request that is computed again counts as computed
            RunningSet.preempt: request.num_computed_tokens = 0 =>
        a preempted request is not queued again
            RunningSet.preempt: self.waiting.add(request) =>
        a preempted request's blocks are free while it still names them
            RunningSet.release: request.block_ids = [] =>
        what a broken step copied to the host is relied on
            RunningSet.start_over: list(self.waiting) => ()
        after a broken step the runner is not told of its requests again
            RunningSet.start_over: while self.running: self.preempt(self.running.pop(), may_swap=False) =>
        a block table is updated from the wrong index
            RunningSet.send_blocks: (request.request_id, first, tuple(request.block_ids[first:]))
                => (request.request_id, max(0, first - 1), tuple(request.block_ids[first:]))
        a block table misses the first of its new entries
            RunningSet.send_blocks: request.block_ids[first:] => request.block_ids[first + 1:]
        the runner is not told of a request that left
            RunningSet.release: self.released.append(request.request_id) =>
        there are more seats than the limit
            RunningSet.next_waiting: len(self.running) >= self.limits.max_num_seqs
                => len(self.running) > self.limits.max_num_seqs
        a shared block is not counted as shared
            RunningSet.admit: for block in shared: self.pool.share(block) =>
        cached blocks that a request shares count as room
            RunningSet._has_room: self.pool.num_free - sum((self.pool.num_references(block) == 0 for block in shared))
                => self.pool.num_free
        a promised block that is shared counts as published
            RunningSet.admit: next(pending, len(shared)) => len(shared)
        cached tokens are counted anew after a preemption
            RunningSet._count_admission: request.num_cached_tokens < 0 => request.num_cached_tokens <= 0
        tokens found in the cache are not reported
            RunningSet._count_admission: min(request.num_computed_tokens, len(request.prompt_token_ids)) => 0
        a swapped request forgets what it had computed
            RunningSet.admit: max(request.num_computed_tokens, found) => found
        a request that comes back keeps what the runner knew of its table
            RunningSet.admit: request.num_sent_blocks = 0 => request.num_sent_blocks = len(shared)
        running requests are not kept in order
            RunningSet.admit: bisect.insort(self.running, request, key=lambda other: other.rank)
                => self.running.append(request)
    scheduling.step_planner, SCHEDULING
        a request that generates nothing samples a token
            StepPlanner._schedule: start + count == request.num_tokens < request.max_num_tokens
                => start + count == request.num_tokens
        a request is not looked at when its block is full
            StepPlanner._look_later: last + 1 => last + 3
        a request is not looked at when it may have no more tokens
            StepPlanner._look_later: min(last + 1, request.max_num_tokens) => last + 1
        a chunk of a prompt has a mask
            StepPlanner._schedule: request.mask is not None and samples => request.mask is not None
        a request that needs no look has no mask
            StepPlanner._look_later: request.mask is not None => False
        what is scored is told of another request
            StepPlanner._schedule: (len(requests), before, tuple(targets)) => (0, before, tuple(targets))
        a last token of a prompt by itself is sampled at
            StepPlanner._is_ready: not request.generates and known > computed => False
        a pool that ran out takes in newcomers
            StepPlanner.plan: len(self.running_set.preempted) == num_preempted => True
        the token in flight is not counted against the limit
            StepPlanner._is_ready: known >= request.max_num_tokens => known > request.max_num_tokens
        feedback comes from the next row
            StepPlanner._schedule_single_tokens: request.last_row => request.last_row + 1
        a prompt's first token is fed back from the wrong row
            StepPlanner._schedule: len(requests) + self._num_drafts => len(requests) + self._num_drafts - 1
        the budget is passed over
            StepPlanner.budget: self.limits.max_num_batched_tokens => self.limits.max_num_batched_tokens + 1
        decodes are not counted in the budget
            StepPlanner._schedule_the_rest: self.budget(len(requests)) - len(output.token_ids)
                => self.budget(len(requests))
        a long prompt starves the decodes behind it
            StepPlanner._is_ready:
                known >= request.max_num_tokens or (request.num_in_flight and request.waits_for_tokens)
                => lacking or known >= request.max_num_tokens or (request.num_in_flight and request.waits_for_tokens)
        a long prompt takes all of the step
            StepPlanner._schedule_the_rest: left // 2 => 0
        an urgent request preempts its equals
            StepPlanner._preempt_for_priority: other.rank[0] > request.rank[0] => other.rank[0] >= request.rank[0]
    scheduling.prefix_cache, SCORING
        log-probabilities are asked for of what is not computed
            PrefixCache._most_found: scored // self.block_size => -(-scored // self.block_size)
    scheduling.request, SCORING
        scored tokens are predicted by the token before the last
            Request.prompt_targets: first - start - 1 => first - start - 2
        the last token that is scored is left out
            Request.prompt_targets: start + count + 1 => start + count
        the context is scored too
            Request.prompt_targets: max(self.num_scored, start + 1) => start + 1
    scheduling.bucket, BUCKETS
        steps of fewer sizes than they have leave out tokens
            _rounded: -(-count // step) * step => count // step * step
        a step is larger than its bucket
            own_sizes: min(_rounded(num_tokens), bucket.num_tokens) => _rounded(num_tokens)
    worker.step_buffers, TAGS
        what fills a rounded size is of the step before
            StepBuffers.fill: self._pad(fields, *own) => ...
        padding writes to the first block that is handed out
            StepBuffers._pad: SINK_BLOCK => SINK_BLOCK + 1
        padding writes past the sink
            StepBuffers._pad: padding % self.block_size => padding
        sequence lengths leave the newest token out
            StepBuffers.fill: fields['seq_lens'][:n] = seq_lens => fields['seq_lens'][:n] = seq_lens - 1
        positions are off by one
            StepBuffers.fill: starts - (ends - counts) => starts - (ends - counts) + 1
        logits are taken from the first token of a request
            StepBuffers.fill: self._fill_logits_rows(fields, output, store, rows, ends - 1, seq_lens)
                => self._fill_logits_rows(fields, output, store, rows, ends - counts, seq_lens)
        query_start_loc leaves out its padding
            StepBuffers._pad: fields['query_start_loc'][num_requests + 1:] = num_tokens =>
        rows of the step before stay in the padding
            StepBuffers._pad: fields[name][num_requests:] = 0 =>
        all rows have the first one's seed
            StepBuffers._fill_logits_rows: store.parameters[field.name][row_owners]
                => store.parameters[field.name][row_owners if field.name != 'seed' else row_owners[0]]
        a row's random numbers depend on its chunk
            StepBuffers.fill: self._fill_logits_rows(fields, output, store, rows, ends - 1, seq_lens)
                => self._fill_logits_rows(fields, output, store, rows, ends - 1, counts)
        logits of drafts are those of the last token
            StepBuffers._fill_logits_rows: indices[places] - distances => indices[places]
        a prompt that is scored keeps rows of logits alone
            StepBuffers.fill: self._keep_rows(fields, taken[0], taken[2], num_rows, keeps_all=keeps_all) =>
                self._keep_rows(fields, taken[0], taken[2], num_rows, keeps_all=False)
        logits are taken from tokens where rows were kept
            StepBuffers._keep_rows: indices[:rows] = np.arange(rows, dtype=np.int32) =>
        random numbers of drafts are those of the last token
            StepBuffers._fill_logits_rows: next_positions[places] - distances => next_positions[places]
        a request that samples nothing has no row
            logits_rows: np.maximum(np.array(output.num_samples, dtype=np.int64), 1)
                => np.maximum(np.array(output.num_samples, dtype=np.int64), 0)
        tables are taken by place in the step, not by row
            StepBuffers.fill: known[rows, :width] => known[:n, :width]
        a step of the same requests has their blocks of before
            StepBuffers._fill_again: has_new_blocks => not has_new_blocks
        buffers are taken to hold a step that they do not
            StepBuffers.fill: is_plain and held is rows and held_counts == output.num_samples
                => is_plain and held is not None and held_counts == output.num_samples
        feedback of the step before stays
            StepBuffers.fill: fields['feedback'][:total] = -1 =>
        states go where those of a step before went
            StepBuffers._fill_states: write_slot[row, len(writes):], write_after[row, len(writes):] = (SINK_SLOT, 0) =>
    worker.request_rows, TAGS
        two requests share a row
            RequestRows.update: self._free_rows.pop() => self._free_rows[-1]
        rows of released requests are lost
            RequestRows.update: self._free_rows.append(row_of.pop(request_id)) => row_of.pop(request_id)
        a row keeps the temperature of the request before
            RequestRows._admit: self.parameters[field.name][row] = field.value(params, admission.seed, self.vocab_size)
                => self.parameters[field.name][row] if field.name == "temperature" and self.parameters[field.name][row]
                else field.value(params, admission.seed, self.vocab_size)
    step.step, TAGS
        feedback from the first row is taken for none
            _fed_back: source >= 0 => source > 0
    ops.swap, TAGS
        all layers are copied to the same bytes
            _words: start += block_bytes =>
        the scales are not copied
            _words: caches => caches[:-1]
    ops.swap, COPIES
        the wrong blocks are copied
            _copy_rows: some_source => some_source.sort().values
    worker.block_copies, ENGINE
        blocks are swapped in before others are swapped out
            _copy: ((told.swapped_out, swap.swap_out), (told.swapped_in, swap.swap_in))
                => ((told.swapped_in, swap.swap_in), (told.swapped_out, swap.swap_out))
        nothing is copied back
            _copy: ((told.swapped_out, swap.swap_out), (told.swapped_in, swap.swap_in))
                => ((told.swapped_out, swap.swap_out),)
        the host's blocks are taken to have a sink
            swap_indices: indices[:, 1] - 1 => indices[:, 1]
    worker.shared_rows, SHARED_ROWS
        all ranks put their heads where the first has its own
            _pieces: shard.rank * (run // own_run) // shard.size * own_run => 0
        ranks put their heads in each other's places
            _pieces: shard.rank * (run // own_run) // shard.size * own_run =>
                (shard.size - 1 - shard.rank) * (run // own_run) // shard.size * own_run
        only the first rank has a part
            _pieces: found.append(Piece(number, offset, start + first * size, own_run * size)) =>
                if shard.rank == 0: found.append(Piece(number, offset, start + first * size, own_run * size))
        a row has the next tensor behind a rank's part of one
            _pieces: start + run * size => start + own_run * size
        ranks copy to the row before
            SharedSwapSpace.copy: rows[row - 1, start:start + size] = blocks[tensor][block, offset:offset + size] =>
                rows[row - 2, start:start + size] = blocks[tensor][block, offset:offset + size]
    step.kv_cache, SHARED_ROWS
        channels of a convolution are cut in one piece, with those of other heads
            block_tensors: spec.runs or spec.convolution[1:] => spec.convolution[1:]
    parallel.rank_processes, ROLES_OF_RANKS
        rows are given anew while ranks may still copy to them
            RankProcesses.launch: self._settle() =>
    worker.tier_files, ROLES_OF_RANKS
        engines with other sums than exact ones take blocks of these
            folder_key: getattr(config, field.name) => getattr(config, field.name) if field.name not in
                ('tensor_parallel_exact',) else None
    engine.core, ABORTS
        an abort does not reach the scheduler
            EngineCore.abort: self.scheduler.finish(completion.request, 'abort') =>
    scheduling.forks, FORKS
        nothing is copied on write
            Forks.must_copy: index != request.forked_index => True
        a child writes to what the prefix cache has as its parent's
            Forks.must_copy: self.num_tables(block) > 1 or self.pool.digest(block) is not None
                => self.num_tables(block) > 1
        the parent does not know that others have its block
            Forks.fork: parent.forked_index, parent.next_look = (child.forked_index, 0) =>
        a copy is made, and the runner not told of it
            Forks.replace: request.num_sent_blocks = min(request.num_sent_blocks, index) =>
        a child counts one token too many as computed
            Forks.fork: min(parent.num_computed_tokens, known, child.num_tokens - 1)
                => min(parent.num_computed_tokens + 1, known, child.num_tokens - 1)
        a child counts the token in flight as known
            Forks.fork: min(parent.num_computed_tokens, known, child.num_tokens - 1)
                => min(parent.num_computed_tokens, child.num_tokens - 1)
        children name blocks that they are not counted for
            Forks.fork: for block in blocks: self.pool.share(block) =>
        the blocks of a kept request are never let go
            Forks.end_forking: self._take_back(request, self.kept) =>
        an aborted child that waits keeps what it holds
            Forks.drop: self._take_back(request, self.holders) =>
        who waits counts as computed what was taken back from it
            Forks._take_back: request.num_computed_tokens = 0 =>
        what a step copies may be overwritten in it
            Forks.replace: self._targets.append(block) => self._targets.append(block); self.end_copies()
        a continuation that gets no places keeps its state
            Forks.fork: self.states.release(child) =>
    scheduling.window_pool, WINDOWS
        a window ends a key early
            WindowPool.first_seen: position - self.window + 1 => position - self.window + 1 + self.block_size
        a place that others need is given away
            WindowPool.drop: if count: self._users[block] = count; return =>
        a place that somebody takes again may be evicted
            WindowPool.hold: self._cached.pop(block, None) =>
        a block that holds something else keeps its place
            WindowPool.forget: del self._cached[block]; self._empty.append(self._place_of.pop(block)) =>
        a hit reaches over dropped places
            WindowPool.longest_hit: there = there + 1 if block in self._place_of else 0 => there += 1
        what was computed twice is dropped twice
            WindowPool.exchange: self.hold(holder) =>
    scheduling.window_places, WINDOWS
        places are dropped before the last query that sees them
            WindowPlaces.slide: start => start + 2
        a released request keeps its places
            WindowPlaces.release: window.drop(block, self._can_be_found(block)) =>
        places are sent from where the window begins now
            WindowPlaces.send: max(held.sent, held.first) => held.first + 1
        a window's blocks are not copied back
            WindowPlaces.swap_in: told.swapped_in += [(window.place(block), there) for block, there in pairs]
                => list(pairs)
        a child takes places that its parent has dropped
            WindowPlaces.fork: any((own.first < there.first for own, there in zip(held, parent.held, strict=True)))
                => False
        sink tokens stay where they were
            WindowPlaces.has_old_sinks: stream.num_dropped(request.num_computed_tokens) > request.num_dropped_tokens
                => False
    scheduling.state_pool, STATES
        the sink of the states is handed out
            StatePool.__init__: range(num_slots, 0, -1) => range(num_slots - 1, -1, -1)
        a slot is free as soon as one of its requests leaves it
            StatePool.free: self._references[slot] == 0 => self._references[slot] <= 1
        an evicted snapshot can still be found
            StatePool.withdraw: del self._slot_of[digest] =>
        a snapshot outlives its block in a slot that is empty
            StatePool.forget: self._empty.append(slot) =>
    scheduling.state_pool, STATES
        a state that another request reads is written over
            StateSlots.make_writable: slot and pool.num_references(slot) == 1 and (not pool.is_snapshot(slot))
                => slot and (not pool.is_snapshot(slot))
        a snapshot is written over
            StateSlots.make_writable: slot and pool.num_references(slot) == 1 and (not pool.is_snapshot(slot))
                => slot and pool.num_references(slot) == 1
        the slot that a request has read is never given back
            StateSlots.send: left.append(held.slot) =>
        the state is that after all drafts
            StateSlots.accept: num_accepted - 1 => -1
        the states of drafts that were dropped stay
            StateSlots.accept: *drafted => *drafted[:num_accepted]
        a snapshot is published as that of the block after it
            StateSlots.publish: tokens // self.block_size - 1 => tokens // self.block_size
        the snapshot of the block before is found
            StateSlots.longest_hit: end - 1 => max(0, end - 2)
        a fork has the state of other tokens
            StateSlots.fork: held.drafted or held.target or (not held.slot) or (count != parent.num_computed_tokens)
                => held.drafted or held.target or (not held.slot)
        a continuation has the state after the whole prompt
            StateSlots._before_last: last - start => end - start
        the state that continuations start from is never given back
            StateSlots.end_forking: self.pool.free(held.before_last) =>
        a request that ends leaks its slots
            StateSlots.release: for slot in request.state.slots(): self.pool.free(slot) =>
        a swapped-out request leaks its host slot
            StateSlots.free_host: self.host_pool.free(request.host_slot) =>
    scheduling.prefix_cache, STATES
        a state is read in the step that writes it
            PrefixCache._is_readable: not self.states.are_used and self._is_filling(request, index)
                => self._is_filling(request, index)
        a prefix is used without a state
            PrefixCache._usable: shorter = self.states.longest_hit(request.block_digests, shorter) =>
    scheduling.tiers, TIERS
        a state is found in host memory before it is copied there
            KVTiers._store_state: self._states_out.append((slot, -row)) =>
        a row is given away while a state is copied to it
            KVTiers._store_state: self._pin_for_step(held) =>
        the state at the end of another block comes back
            KVTiers.find_with_state: self._at(request, state_name(digests[end - 1]))
                => self._at(request, state_name(digests[max(0, end - 2)]))
        a snapshot is copied out of a slot that was given away
            KVTiers.send: self.pool.states.lookup(digest) != slot or self._store_state(slot, digest, makes_room=False)
                => self._store_state(slot, digest, makes_room=False)
    scheduling.running_set, TIERS
        a state from host memory is taken for that of fewer tokens
            RunningSet.admit: self.states.enter(request, digest, -state.row, output, computed)
                => self.states.enter(request, digest, -state.row, output, len(shared) * self.limits.block_size)
    scheduling.suspects, SUSPECTS
        of two requests that fail together both are the cause
            Suspects.take: len(requests) == 1 => len(requests) <= 2
        the second half of the requests of a broken step is not tried
            Suspects.take: [others, requests[half:], requests[:half]] => [others, requests[:half]]
        a request has passed before the token at which its step broke
            Suspects.take: computed + 1 => computed - 1
        a request that was preempted meanwhile has passed at once
            Suspects.take: max(request.num_computed_tokens, request.num_lost_tokens) => request.num_computed_tokens
        those that have passed run in the trials of others
            Suspects._run_alone: running_set.preempt(running_set.running.pop(), may_swap=False) => break
        other requests are admitted to a trial
            Suspects._run_alone: group => None
        the others wait for ever
            Suspects._end: self.running_set.waiting.serve_only(None) =>
        requests that break steps only together do so for ever
            Suspects._end: request.num_unexplained_faults += 1 =>
    scheduling.scheduler, SUSPECTS
        steps overlap while a cause is looked for
            Scheduler.schedule: if self.in_flight: return SchedulerOutput() =>
        whoever was in a broken step ends
            Scheduler.fail_steps_in_flight:
                self.suspects.take([request for request in failed if request.status is not Status.FINISHED])
                => (self.suspects.take([r for r in failed if r.status is not Status.FINISHED]), [*failed])[1]
    scheduling.running_set, FORKS
        the copy is forgotten
            RunningSet.make_writable: output.copies.append((shared, block)) =>
        who makes room for a copy forgets to make it
            RunningSet.make_writable: while self.forks.must_copy(request, position): ...
                => if self.forks.must_copy(request, position): ...
        children rely on what a broken step was to compute
            RunningSet.start_over: self.take_back() => False
        a request that ends loses the blocks that it is to keep
            RunningSet.release: keeps_blocks => False
    ops.swap, BLOCK_COPIES
        the blocks of one layer alone are copied
            copy_blocks: for cache in caches: ... => for cache in caches[:2]: ...
        blocks are copied the other way
            copy_blocks: blocks.index_copy_(0, targets, blocks.index_select(0, sources))
                => blocks.index_copy_(0, sources, blocks.index_select(0, targets))
    engine.beam_search, BEAM_GROUP
        no more continuations are looked at than there are beams
            BeamGroup.advance: self.count => self._beam_width
        a beam that ended may come from any place
            BeamGroup.advance: candidates[:self._beam_width] => candidates
        the search ends with the first beams that end
            BeamGroup.advance: best_possible <= self._ended[-1].score => True
        scores are not divided by the length
            BeamGroup.advance: beam.logprob / length ** self._length_penalty => beam.logprob
    engine.beam_search, BEAMS
        beams do not keep their blocks
            BeamGroup._request: True => False
        beams end at an end-of-text token of their own
            BeamGroup._is_over: beam.token_ids[-1] in self._eos_token_ids => False
    step.logits, RANK_LOGITS
        masks of a rank are those of the first tokens
            of_part: first // _BITS + torch.arange(count // _BITS, device=first.device)
                => torch.arange(count // _BITS, device=first.device)
        a rank without the token biases another one
            of_part: torch.where(is_none, 0.0, biases) => biases
        a rank biases tokens of others
            of_part: torch.where(is_here, ids, ids.gather(1, other)) => ids
        drafts of other ranks count
            process_logits: is_own & is_here => is_own
    step.rank_logits, RANK_LOGITS
        every rank counts a token
            processing_rank_sampler_function: torch.where(is_here, due, 0.0) => due
        what is behind the vocabulary is likelier, too
            logprob_rows_of_ranks: torch.arange(own.shape[1], device=own.device) + tokens.first < vocab_size
                => torch.ones(own.shape[1], dtype=torch.bool)
        networks draft tokens that the model does not know
            drafted: sample_of_ranks(logits, params, tokens, vocab_size)
                => sample_of_ranks(logits, params, tokens, vocab_size + 500)
    step.sampling, SAMPLER
        all positions have the same noise
            sample: params.position => params.position * 0
        all requests have the same noise
            sample: params.seed => params.seed * 0
        all rows have the first one's top_k
            sample: params.top_k => params.top_k[:1].repeat(len(logits))
        top_p and min_p are mixed up
            sample: params.top_k, params.top_p, params.min_p, params.top_n_sigma
                => params.top_k, 1 - params.min_p, 1 - params.top_p, params.top_n_sigma
        top_n_sigma is forgotten
            sample: params.top_n_sigma => params.top_n_sigma * 0
    ops.sampling.noise, NOISE
        the least of a block is that of one token
            _least_of_block: _exponential(first) / BLOCK => _exponential(first)
        the least of a block is at the first token
            _least_of_block: second % BLOCK => second * 0
        all tokens of a block have its least
            token_noise: least + more => least
        a token's own noise is the same at all positions
            token_noise: (position, tokens, _MORE) => (position * 0, tokens, _MORE)
        small exponential variables lose their last digits
            _exponential: (bits & 0x7FFFFF) | 0x800000 => (bits & 0x7FF000) | 0x800000
    ops.sampling.reference, NOISE
        the best of the tokens with their block's largest noise does not compete
            _winners: of_tokens >= best[:, None] => of_tokens > best[:, None]
        tokens that the filters took compete
            _winners: stays & (of_tokens >= best[:, None]) => (of_tokens >= best[:, None])
    ops.attention.kv_quant, QUANTISED
        the scale is dropped where codes are made
            quantise: scale => torch.ones_like(scale)
        the scale is dropped where codes are read
            dequantise: codes.float() * scale[..., None] => codes.float()
        a row that is not finite gets a scale
            quantise: torch.where(finite, scale, float('nan')) => scale
    ops.attention.paged_attention, QUANTISED
        the scale of a new key is not kept
            paged_attention_reference: scale[slots // block_size, :, slots % block_size] = new_scale =>
    ops.linear.searched_scales, ROUNDING
        zero points are not fitted to the fitted scale
            _fit: of_values / fitted.double() => of_values / scales.double()
        ranges of fewer steps are not tried
            _candidates: for steps in STEPS: ... => for steps in STEPS[:1]: ...
        the last candidate is taken
            _chosen: torch.where(error < least, scales, best) => scales
    scheduling.adapter_slots, ADAPTER_SLOTS
        a slot keeps the adapter that was evicted
            AdapterSlots.enter: self.loads.append((slot, adapter)) =>
        the adapter of a running request is evicted
            AdapterSlots.enter: not self._users[other] => True
    models.linears.whole, WHOLE
        a slot keeps the whole matrix of the adapter before
            WholeMatrices.put: int(matrix is not None) => 1
        the embedding of another slot is read
            WholeMatrices.rows: self.weights.flatten(0, 1)[number * vocab_size + ids] =>
                self.weights.flatten(0, 1)[ids]
    worker.draft_network, COMPRESSED_HEADS
        Medusa heads stay in 16 bits beside a model that is compressed
            DraftPlan.of: 0 if cache_dtypes else bytes_of_layers(target, dtype) => 0
    ops.linear.compressed_linear, COMPRESSED
        a group that came in parts lacks the last ones
            Compressor._joined: missing[0] > 0 => missing[0] > 9
        rows of one expert are those of another
            Compressor.put: self._joined((expert, group), within, size, part) =>
                self._joined((0, group), within, size, part)
        exceptions that have no room are left out
            Compressor._compress: count < room => True
    worker.request_rows, ADAPTERS
        a row keeps the slot of the request before
            RequestRows._admit: self.adapter_slots[row] = admission.adapter_slot =>
                self.adapter_slots[row] = self.adapter_slots[row] or admission.adapter_slot
    scheduling.prefix_cache, ADAPTERS
        keys of one adapter are taken for those of another
            PrefixCache._digests: [request.adapter] if request.adapter else [] => []
    adapters.host_adapters, HOST_ADAPTERS
        files that changed are not read again
            HostAdapters.get: adapter is None or stamped != found => adapter is None
        a copy that brings the time of its file along is no change
            HostAdapters.get: adapter is None or stamped != found =>
                adapter is None or [file[:4] for file in stamped] != [file[:4] for file in found]
        files that are changed at once keep their time
            HostAdapters._read: _wait_for_the_next_time(before) =>
        adapters stay in host memory
            HostAdapters.get: len(self._recent) > self._most => False
    routing.prefixes, ROUTING
        digests of prompts leave the parent out
            prefix_digests: block_digest(parent, token_ids[start : start + block_size]) =>
                block_digest(b"", token_ids[start : start + block_size])
        all of a prompt may be found
            prefix_digests: len(token_ids) - block_size => len(token_ids) - block_size + 1
        the start of a prompt goes before its end
            Recent.use: reversed(names) => names
        what is used again is as old as before
            Recent.use: self._names.move_to_end(name) =>
        what was used last goes first
            Recent.use: self._names.popitem(last=False) => self._names.popitem()
    routing.router, ROUTING
        prompts of all salts are one
            RoutedPrompt.of: prefix_digests(token_ids, block_size, cache_salt, *own) =>
                prefix_digests(token_ids, block_size, *own)
        a prefix is followed however busy its replica is
            Router.choose: load <= bound => True
        the shortest prefix is followed
            Router.choose.rank: -known => known
        a short prefix is followed
            Router.choose.rank: _LEAST_SHARE * len(prompt.digests) => 0
        adapters are not followed
            Router.choose.rank: prompt.adapter not in held.adapters => False
        the busiest replica is taken
            Router.choose.rank: loads[replica] => -loads[replica]
        all idle prompts go to one replica
            Router.choose.rank: held.last_sent => 0
        what is cached counts as work
            Router.num_new: self._held[replica].blocks.num_first(prompt.digests) => 0
        a dead replica's blocks are still known
            Router.add: self._held[replica] = _Held(num_blocks, num_adapters) =>
                self._held.setdefault(replica, _Held(num_blocks, num_adapters))
    server.open_request, REPLICAS
        text comes again after a death
            _without_again: piece.text[characters:] => piece.text
        tokens come again after a death
            _without_again: piece.token_ids[tokens:] => piece.token_ids
        a continuation that has ended goes on after a death
            OpenRequest.take: had.has_ended = piece.finish_reason is not None =>
        tokens whose log-probabilities are not known are gone on with
            OpenRequest.begin_again: self.asked.sampling.get("logprobs") is None => True
    server.take_over, TAKEN
        random bytes serve twice
            TakenOver.request: self._challenges.pop(challenge, -_CHALLENGE_SECONDS) =>
                self._challenges.get(challenge, -_CHALLENGE_SECONDS)
        a request of another server needs no proof
            TakenOver.request: not is_right or time.monotonic() > made + _CHALLENGE_SECONDS =>
                time.monotonic() > made + _CHALLENGE_SECONDS
        the server that takes requests need not know the key
            OtherServer.meet: not hmac.compare_digest(str(answer.get("proof")).encode(), expected.encode()) => False
        a server of other weights takes requests
            OtherServer.meet: here != there and (name != "model" or facts.get("key") != own["key"]) =>
                here != there and name == "version"
        a server takes its own requests
            OtherServer.meet: facts.get("server") == own.get("server") => False
        an adapter of the same name is the same
            OtherServer.meet: digest is None or facts["adapters"].get(adapter.name) != digest => False
    server.replicas, REPLICAS
        a request that kills engines kills them all
            Replicas._lose: request.is_second or not self._serves_again => not self._serves_again
        what a dead engine gave comes again
            Replicas._lose: request.begin_again() => request.is_begun = False
        the prompt of another engine is the answer
            Replicas._take: request.prompt_engine is not None and output.engine == request.prompt_engine => False
        a slow prefill engine is waited for
            Replicas._begin_prompt: loop.call_later(seconds, self._end_prefill, request_id, request, None)
                => loop.call_later(3600, self._end_prefill, request_id, request, None)
        blocks of all prompts of an engine are waited for at once
            Replicas._begin_prompt: len(prompts) == 1 => True
        the next prompt's blocks are not waited for when the first has ended
            Replicas._leave_prompt: was_first and prompts and prompts[0] in self._requests => False
        a request goes to a second engine when its prompt has ended
            Replicas._end_prefill: request.engine is not None => False
        a drained engine gets requests
            Replicas._of_role: self._fault(one) is None and one.place.number not in self._drained =>
                self._fault(one) is None
        two drains at once move a request twice
            Replicas._hand_over: self._handing[engine] => contextlib.nullcontext()
        a request that was left runs on
            Replicas._forget: client.abort(left) => None
        what another server gave before it broke off comes again
            Replicas._serve_elsewhere: request.begin_again(request.known_ids) => None
        a dead engine's requests count as its work
            Replicas._lose: self._set_left(request, 0) =>
        a request without a seed is another one the second time
            Replicas._made: request.sampling.get("seed") is None => False
        a hanging engine gets requests
            Replicas._of_role: working or others => of_role
    models.offload, OFFLOAD
        a buffer is filled before its layer has read it
            with_fetches: layers[turn - _BUFFERS] + 1 => layers[turn - _BUFFERS]
        all layers have one buffer
            with_fetches: turn % _BUFFERS => 0
        a layer reads the other buffer
            _Turn.__call__: return self._buffers[key] =>
                return self._buffers.get((1 - key[0], *key[1:]), self._buffers[key])
        a tensor is not awaited
            with_fetches: tuple(buffer for _, buffer in pairs) => tuple(buffer for _, buffer in pairs[1:])
    models.layers.residual, OFFLOAD
        weights are not awaited
            Residual.normed: norm.awaited => ()
    models.layers.residual, LAST_ROWS
        the sum keeps its first rows
            Residual.keep: ops.rows_at(self.tensor(), rows) => self.tensor()[:len(rows)]
    worker.head_stage, LAST_ROWS
        Medusa heads take rows of logits for tokens
            MedusaStage._has_all_rows_of: self._step.has_all(output) => True
        Medusa heads take tokens of a scored prompt for rows of logits
            MedusaStage._has_all_rows_of: self._step.has_all(output) => False
    worker.draft_network, LAST_ROWS
        rows are left out that a head reads
            DraftNetwork.reads_every_row: max(self.taps) == num_layers => False
    models.last_rows, LAST_ROWS
        kept rows have the adapters of other tokens
            with_last_rows: found if slots is None else with_slots(found, slots) => found
        layers that read the whole step get some rows
            last_layers: any((one is not None for one in others)) => False
    models.last_layer, LAST_LAYER
        keys that are gone are read
            last_layer: spec.window in windows => False
        the last layer reads a stream that begins anew
            _through: with_stream(weights, inputs) => with_stream(weights, inputs * 0)
        the last layer is computed as if it wrote to the cache
            _through: step.slot_mapping % cache.k.shape[2] => step.slot_mapping + 4
    worker.head_stage, LAST_LAYER
        a layer that guesses takes rows of logits for tokens
            LastLayerStage._has_all_rows_of: self._step.has_all(output) => True
        a layer that guesses takes tokens of a scored prompt for rows of logits
            LastLayerStage._has_all_rows_of: self._step.has_all(output) => False
        what goes into the last layer is taken for what it gives
            LastLayerStage._prompt_recipe:
                functools.partial(super()._prompt_recipe(most), last_layer=self.network.last_layer.config) =>
                super()._prompt_recipe(most)
    worker.draft_network, LAST_LAYER
        what goes into the layer before the last is kept
            DraftNetwork.taps: self.last_layer.number => self.last_layer.number - 1
    step.head_drafting, LAST_LAYER
        drafts that were right have what was computed of the token before them
            _accepted_rows: known.token_row[owner] + place => known.token_row[owner]
    worker.started_model, LAST_LAYER
        what adapters change is left out where the last layer is computed later
            StartedModel._last_layer: self.adapters is None => True
    worker.started_model, KEYS
        the key of a process has an EAGLE-3 head's layers, which that of ranks has not
            StartedModel._open_files: None if own is None else own.number => drafting.network.taps
    worker.tier_files, KEYS
        blocks with what goes into the last layer are taken for those with what it gives
            open_files: last_layer => None
    worker.pool_pages, POOL_PAGES
        blocks are asked for as if none had been used
            PoolPages.ask: used + self._ahead => self._ahead
        the first pages of blocks are left out
            PoolPages._pieces_of: range(first, end, _HUGE_PAGE) => range(first + mmap.PAGESIZE, end, _HUGE_PAGE)
    ops.fetch, FETCH
        a copy does not wait for what reads its buffer
            _begin_copy: beside.wait_stream(main) => None
        a layer waits for the copy behind its own
            _await_copy: main.wait_event(_arrival(buffer.device, buffer.data_ptr())) =>
                main.wait_stream(_stream_beside(main))
    tuning.draft_recording, RECORDING
        tokens that are computed again count as sampled
            _Recording._entered: range(first, first + count) => range(first, first + max(1, count))
        a network reads what the model samples, not what is known
            _Recording.serve: _put(tokens) if exchanges else None => None
    tuning.draft_replay, RECORDING
        prompts are read anew behind each step
            _Model._num_lacking: num_read is None => True
        each continuation reads its prompt anew
            _Model._num_lacking: prompt in self._prompts_read => False
        a replay's steps take no time
            _Clock.__call__: time.perf_counter() + self.ahead => time.perf_counter()
        a wrong draft is looked up where the first draft was
            wrong_drafts: position + wrong => position
    worker.calibration, CALIBRATION
        steps of fewer requests are kept as those of a whole bucket
            measure_decodes: min(size, limits.max_num_seqs) => size
    ops.linear.quantized_linear_a8, ROUNDING
        all groups have the first one's scale
            quantized_linear_a8_reference: products * sx[:, g : g + 1] => products * sx[:, :1]
"""


def _bugs() -> Iterator[tuple[Bug, Checks]]:
    for module, checks, text in re.findall(r"^ {4}(\S+), (\w+)\n((?: {8}.*\n)+)", _PLANTED, re.MULTILINE):
        for name, change in re.findall(r"^ {8}(\S.*)\n((?: {12}.*\n)+)", text, re.MULTILINE):
            function, old, new = re.fullmatch(r"([\w.]+): (.*?) => ?(.*)", " ".join(change.split())).groups()
            yield Bug(name, f"compiled_llm.{module}", function, old, new), globals()[checks]


BUGS = dict(_bugs())
