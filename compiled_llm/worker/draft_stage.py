"""What drafts after each step: its compiled functions and buffers. NetworkStage: a network, on the model's KV blocks.

A step goes as before. Behind it, for the requests of which it has sampled a token, ``draft`` guesses the next ones
(``step/drafting.py``). Tokens that a network lacks but for a request's last one, as those of prompts, are computed by
``draft_prompt`` before. Where the scheduler has no use for drafts, neither runs; ``DraftCoverage`` knows what is
lacking then.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.speculative_config import NetworkTree
from compiled_llm.compiling.build_processes import Job
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.models.inputs import FeatureCache, KVCache, StepInput
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size, mark_static_address
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.drafting import NO_DRAFT, DraftInput, Sampler, draft_model_function, draft_prompt_function
from compiled_llm.step.tree_drafting import draft_tree_function
from compiled_llm.worker import graph_fields
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.draft_buffers import DraftBuffers, PromptBuffers
from compiled_llm.worker.draft_coverage import DraftCoverage, Tokens
from compiled_llm.worker.draft_network import DraftNetwork
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.step_buffers import StepSizes, mark_sizes

_NO_BOUND = 1 << 30  # tokens of a request in a step
Make = Callable[..., CompiledFunction]


class Drafts(NamedTuple):
    """What was drafted after a step.

    Attributes:
        places: [N] int64: places in the step of the requests that were drafted for.
        token_ids: ``[most requests, K]`` int64, of which the first N rows are these requests': on the device, or on the
            host.
    """

    places: np.ndarray
    token_ids: Tensor | np.ndarray


def token_ids_of(drafts: Drafts, num_requests: int) -> tuple[tuple[int, ...], ...]:
    """Of each request of a step, its drafts up to the first that there is none of. They are on the host."""
    found: list[tuple[int, ...]] = [()] * num_requests
    for place, row in zip(drafts.places.tolist(), drafts.token_ids[: len(drafts.places)].tolist(), strict=True):
        found[place] = tuple(row[: row.index(NO_DRAFT)] if NO_DRAFT in row else row)
    return tuple(found)


class StepOutputs(NamedTuple):
    """What a step leaves on the device, and a network reads.

    Attributes:
        last_tokens: ``[rows]`` int64, its tokens.
        hidden: ``[tokens, *]``, the hidden states that features are made of; see ``HeadFamily.taps``.
        slot_mapping: of each bucket, ``[T]`` int32.
        has_all: whether ``hidden`` has all tokens of a step; else those alone whose logits it computes.
    """

    last_tokens: Tensor
    hidden: Tensor
    slot_mapping: Mapping[Bucket, Tensor]
    has_all: Callable[[SchedulerOutput], bool]


class Part(NamedTuple):
    """A function of a network, for so many requests or tokens: on a CPU one serves all sizes, see ``StepSizes``.

    Attributes:
        recipe: makes the function, in any process; ``arguments``: what it is called with, each time.
        passes: over the network's layers, for how long it takes to compile.
    """

    name: str
    recipe: Callable[[], Callable]
    arguments: Callable[[], tuple]
    passes: int


class DraftStage:
    """Owns the functions that draft behind each step, and their inputs.

    Attributes:
        token_ids: ``[most requests, K]`` int64 on the device: what was drafted last.
        kv_cache: of its own: none, unless it is a network's.

    Args:
        weights: what the functions are called with.
        num_tokens, num_layers: K, and the layers that each of these drafts goes through.
        recipe: makes the function that drafts, see ``draft_model_function``.
        depends: what the functions depend on besides K.
        last_tokens: ``[rows]`` int64, where a step leaves its tokens.
        tables: on a GPU, the block tables of all requests.
        num_windows, num_rows: see ``DraftBuffers``.
        num_columns: of ``token_ids``; None: K.
    """

    kv_cache: KVCache = ()

    def __init__(
        self,
        weights: Any,
        num_tokens: int,
        num_layers: int,
        recipe: Callable[..., Callable],
        depends: Mapping[str, Any],
        limits: EngineLimits,
        device: torch.device,
        *,
        last_tokens: Tensor,
        tables: BlockTables | None,
        num_windows: int = 0,
        num_rows: int = 0,
        num_columns: int | None = None,
    ) -> None:
        self._weights, self._num_layers, self._last_tokens = weights, num_layers, last_tokens
        self._limits, self._recipe, self._num_passes = limits, recipe, num_tokens
        self._one_for_all = device.type == "cpu"
        sizes = limits.decode_bucket_sizes
        self.token_ids = torch.full((sizes[-1], num_columns or num_tokens), NO_DRAFT, dtype=torch.int64, device=device)
        mark_static_address(self.token_ids)
        if self._one_for_all:
            mark_dynamic_size(self.token_ids, 0, DynamicSize("most drafted requests", 17))
        self._inputs = {
            size: DraftBuffers(size, num_tokens, limits, device, tables, num_windows, num_rows) for size in sizes
        }
        self._depends = {**depends, "num_speculative_tokens": num_tokens}
        self._functions: dict[str, CompiledFunction] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs on the device, weights and KV cache left out."""
        return self.token_ids.nbytes + sum(each.buffers.nbytes for each in self._inputs.values())

    def hold(self, kv_cache: KVCache, draft_cache: KVCache) -> None:
        """The model's KV cache and the drafter's own are these from now on; on a GPU, ``record_again`` then."""
        self.kv_cache = draft_cache

    # -- Compiling

    def jobs(self, weight_of_step: float, weight_of_layer: float) -> list[Job]:
        """Everything to compile, for other processes: how long a step takes besides its layers, and each of them."""
        threads, found = torch.get_num_threads(), dict[str, Job]()
        for part in self._parts():
            weight = weight_of_step + weight_of_layer * self._num_layers * part.passes
            job = Job(part.name, part.recipe, part.arguments(), threads, weight, self._depends)
            found.setdefault(part.name, job)
        return list(found.values())

    def warm_up(self, make: Make) -> None:
        """Compile everything, and run it once on padding. ``make``: (function, name, what it depends on)."""
        for name, recipe, arguments, _ in self._parts():
            if name not in self._functions:
                self._functions[name] = make(recipe(), name, self._depends)
                self._functions[name].warm_up(arguments)

    def record_again(self) -> None:
        """The KV cache is another one: on a GPU, record every CUDA graph on it."""
        for part in self._parts():
            self._functions[part.name].record_again(part.arguments)

    def functions(self) -> dict[str, CompiledFunction]:
        """All of them, by their names."""
        return dict(self._functions)

    def watch(self, sample: Sampler) -> None:
        """From now on ``sample`` chooses drafts, and nothing of it is compiled: for checks that look on, on a CPU."""
        assert self._one_for_all
        self._functions["draft"] = CompiledFunction(self._recipe(sample=sample), "draft", self.token_ids.device, True)
        self._functions["draft"].warm_up(functools.partial(self._arguments, self._inputs[max(self._inputs)].whole))

    def _parts(self) -> Iterator[Part]:
        """All to compile. On a GPU the largest come first: their memory serves all."""
        for size in sorted(self._inputs, reverse=not self._one_for_all):
            arguments = functools.partial(self._arguments, self._inputs[size].whole)
            yield Part(self._name("draft", size), self._recipe, arguments, self._num_passes)

    def _name(self, kind: str, size: int) -> str:
        return kind if self._one_for_all else f"{kind}_{size}"

    def _arguments(self, known: DraftInput) -> tuple:
        return self._weights, known, self.kv_cache, self._last_tokens, self.token_ids

    # -- Running

    def expect(self, output: SchedulerOutput) -> bool:
        """A step is about to come. Returns whether ``run`` has nothing to do for it, and is to be left out."""
        return not output.drafts_next

    def run(self, output: SchedulerOutput, bucket: Bucket, rows: np.ndarray, store: RequestRows) -> Drafts | None:
        """Draft for the requests of a step whose work is on its way to the device; None: for none of them.

        Args:
            bucket: of the step.
            rows: ``[R]`` int64, those of its requests in ``store``.
        """
        assert output.drafts_next
        return self._draft(np.flatnonzero(output.num_samples), output, rows, store)

    def lack_on_host(self, blocks: Sequence[int]) -> None:
        """Files are read into these host blocks."""

    def run_largest(self) -> None:
        """Run each kind in its largest size, all padding: what it allocates depends on that alone."""
        requests = max(self._inputs)
        self._functions[self._name("draft", requests)](*self._arguments(self._inputs[requests].whole))

    def _has_all_rows_of(self, output: SchedulerOutput) -> bool:
        """See ``StepOutputs.has_all``; it matters to those who read hidden states by ``DraftInput.token_row``."""
        return True

    def _draft(
        self, places: np.ndarray, output: SchedulerOutput, rows: np.ndarray, store: RequestRows
    ) -> Drafts | None:
        """Draft for the requests at ``places`` [N] int64 of the step."""
        if not len(places):
            return None
        size = next(size for size in self._inputs if size >= len(places))
        known = self._inputs[size].fill(places, output, rows, store, has_all=self._has_all_rows_of(output))
        self._functions[self._name("draft", size)](*self._arguments(known))
        return Drafts(places, self.token_ids)


class NetworkStage(DraftStage):
    """A ``DraftStage`` of a network with weights of its own.

    Attributes:
        coverage: what the network lacks of the KV pool; None until that has its size.

    Args:
        vocab_size: of the model that is drafted for.
        kv_cache: the network's, to compile on.
        step: what it reads of each step.
        exact: see ``AttentionSpec``.
    """

    _draft_function: Callable[..., Any] = staticmethod(draft_model_function)
    _tree_function: Callable[..., Any] = staticmethod(draft_tree_function)
    _prompt_function = staticmethod(draft_prompt_function)
    _numbers_rows = False  # whether it has ``DraftInput.row_numbers`` for chains

    def __init__(
        self,
        network: DraftNetwork,
        limits: EngineLimits,
        device: torch.device,
        dtype: torch.dtype,
        *,
        vocab_size: int,
        kv_cache: KVCache,
        step: StepOutputs,
        tables: BlockTables | None,
        exact: bool,
    ) -> None:
        config, tree = network.model_config, network.tree
        depends = graph_fields.of_step(config, limits, dtype, network.cache_dtypes, device)
        if network.last_layer is not None:
            depends |= {"last_layer": dataclasses.asdict(network.last_layer.config)}
        recipe = functools.partial(self._draft_function, config, limits.block_size, vocab_size, exact)
        num_rows = network.num_tokens + 1 if self._numbers_rows else 0
        if tree is not None:
            depends |= {"draft_tree": tuple(tree)}
            recipe = functools.partial(self._tree_function, config, limits.block_size, vocab_size, exact, tree=tree)
            num_rows = tree.depth + 2
        super().__init__(
            network.weights,
            network.num_tokens,
            config.num_layers,
            recipe,
            {**depends, "vocab_size": vocab_size},
            limits,
            device,
            last_tokens=step.last_tokens,
            tables=tables,
            num_rows=num_rows,
            num_columns=None if tree is None else self._num_columns(tree),
        )
        self._num_passes = network.num_tokens if tree is None else tree.depth
        self.network, self.kv_cache = network, kv_cache
        self._step, self._exact = step, exact
        sizes = StepSizes.of(limits, device)
        if config.ropes:
            for table in network.weights.ropes:
                if len(table) == limits.max_model_len:
                    mark_sizes(table, sizes.positions)
        self._prompts = {
            size: PromptBuffers(size, limits, device, tables, sizes)
            for size in (limits.token_bucket_sizes if network.has_cache else ())
        }
        self.coverage: DraftCoverage | None = None

    @functools.cached_property
    def _keeps_features(self) -> bool:
        """Whether it makes features of each step's tokens, drafted behind or not."""
        return bool(self.kv_cache) and isinstance(self.kv_cache[-1], FeatureCache)

    @staticmethod
    def _num_columns(tree: NetworkTree) -> int:
        """What a request's tree takes of ``token_ids``."""
        return 3 * tree.width * (1 + (tree.depth - 1) * tree.ranks)

    def make_coverage(self, num_blocks: int, num_host_blocks: int) -> None:
        """The KV pool and the swap space have so many blocks from now on."""
        self.coverage = DraftCoverage(self._limits, num_blocks, num_host_blocks)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(each.buffers.nbytes for each in self._prompts.values())

    def _parts(self) -> Iterator[Part]:
        for size in sorted(self._prompts, reverse=not self._one_for_all):
            most = _NO_BOUND if self._one_for_all else size
            arguments = functools.partial(self._prompt_arguments, self._prompts[size].whole)
            yield Part(self._name("draft_prompt", size), self._prompt_recipe(most), arguments, 1)
        yield from super()._parts()

    def _prompt_recipe(self, most: int) -> functools.partial:
        """Makes what computes prompts of ``most`` tokens."""
        return functools.partial(self._prompt_function, self.network.model_config, most, self._exact)

    def _prompt_arguments(self, step_input: StepInput) -> tuple:
        return self._weights, step_input, self.kv_cache

    def expect(self, output: SchedulerOutput) -> bool:
        is_done = not output.drafts_next if self.coverage is None else self.coverage.expect(output)
        return is_done and not self._keeps_features

    def run(self, output: SchedulerOutput, bucket: Bucket, rows: np.ndarray, store: RequestRows) -> Drafts | None:
        coverage = self.coverage
        assert coverage is not None, "there is no KV pool yet"
        if not output.drafts_next:
            coverage.end_step(output, rows, np.zeros(len(rows), dtype=bool), store)
            return None
        has_all = coverage.has_all_of(output)
        coverage.begin_step(output, rows, store)
        if has_all:
            is_covered, places = np.ones(len(rows), dtype=bool), np.arange(len(rows))
        else:
            is_covered, places = self._cover(output, rows, store)
        drafts = self._draft(places, output, rows, store)
        coverage.end_step(output, rows, is_covered, store)
        return drafts

    def _cover(self, output: SchedulerOutput, rows: np.ndarray, store: RequestRows) -> tuple[np.ndarray, np.ndarray]:
        """Compute what is lacking before a step's last tokens.

        Returns of whom the drafter has all then, [R] bool, and the places in the step that it can draft for, [N] int64.
        """
        starts = np.array(output.num_computed_tokens, dtype=np.int64)
        step_ends = starts + np.array(output.num_scheduled_tokens, dtype=np.int64)
        samples = np.array(output.num_samples, dtype=np.int64)
        is_told = np.zeros(len(rows), dtype=bool)
        is_told[[place for place, *_ in output.known_tokens]] = True
        # A token that the device alone knew is not there any more.
        is_known = np.array(output.feedback) < 0
        # ``draft`` computes the last token itself, and drafts of it have been.
        ends = np.where(is_known, step_ends - samples, starts)
        found = self._catch_up(output, rows, ends, ends + (samples > 0) * is_known, store)
        is_covered = found & is_known & is_told
        return is_covered, np.flatnonzero(is_covered & (samples > 0))

    def lack_on_host(self, blocks: Sequence[int]) -> None:
        if self.coverage is not None:
            self.coverage.lack_on_host(blocks)

    def run_largest(self) -> None:
        if self._prompts:
            prompt = max(self._prompts)
            self._functions[self._name("draft_prompt", prompt)](*self._prompt_arguments(self._prompts[prompt].whole))
        super().run_largest()

    def _catch_up(
        self, output: SchedulerOutput, rows: np.ndarray, ends: np.ndarray, known_ends: np.ndarray, store: RequestRows
    ) -> np.ndarray:
        """Compute what is lacking of tokens before ``ends``, of the requests of a step ([R] each).

        Others may read a block in the very step that fills it (``PrefixCache``). So where anything is lacking, a token
        before ``known_ends`` that ends a block is computed as well.

        Returns of which requests nothing is lacking then, [R] bool: not of those with tokens that are not known, nor of
        those that the largest bucket has no room for, which are caught up with later.
        """
        coverage = self.coverage
        assert coverage is not None

        def covered(place: int) -> int:
            name, start = output.request_ids[place], output.num_computed_tokens[place]
            return coverage.num_covered(name, int(rows[place]), start, store)

        def has_all() -> np.ndarray:
            return np.array([covered(place) for place in range(len(rows))], dtype=np.int64) >= ends

        found, room = has_all(), max(self._prompts)
        if found.all():
            return found
        ends = np.where(known_ends % self._limits.block_size == 0, known_ends, ends)
        found = has_all()
        chosen: list[Tokens] = []
        for place in np.flatnonzero(~found).tolist():
            # Counted anew: another request of this step may have computed a block that this one reads, too.
            row, start, end = int(rows[place]), covered(place), int(ends[place])
            token_ids = coverage.tokens(output.request_ids[place], row, start, end)
            if token_ids is None or not room:
                continue
            count = min(room, end - start)
            if count > 0:
                chosen.append(Tokens(row, start, token_ids[:count]))
                coverage.cover(row, start, start + count, store)
                room -= count
            found[place] = count == end - start
        self._compute(chosen, store)
        if not found.all():  # others may read a block of these in this very step
            coverage.lack_from_here(output, rows, ~found, store)
            found &= has_all()
        return found

    def _compute(self, chosen: Sequence[Tokens], store: RequestRows) -> None:
        """Compute keys and values of tokens, none or some."""
        if not chosen:
            return
        total = sum(len(tokens.token_ids) for tokens in chosen)
        size = next(size for size in self._prompts if size >= total)
        step_input = self._prompts[size].fill(chosen, store)
        self._functions[self._name("draft_prompt", size)](*self._prompt_arguments(step_input))
