"""CompiledSteps: the compiled steps of all buckets, and everything that they read and write on the device."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.compiling.background import BackgroundBuilds
from compiled_llm.compiling.build_processes import BuildProcesses, Job
from compiled_llm.compiling.cache import CompileCache, engine_cache
from compiled_llm.compiling.costs import Cost
from compiled_llm.compiling.cuda_graphs import GraphPool, begin_step_of_trees, gpu_target
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.compiling.keys import Fields
from compiled_llm.compiling.parallel import build_missing
from compiled_llm.compiling.report import CompileReport
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import FeatureCache, HiddenCache, KVCache, StepInput
from compiled_llm.models.linears.adapted import without_adapters
from compiled_llm.models.linears.vocabulary import shared_head
from compiled_llm.models.registry import attention_layers, layers_of
from compiled_llm.models.stages import is_last
from compiled_llm.models.weights import tensors, used_experts
from compiled_llm.ops import native
from compiled_llm.ops.pinned import give
from compiled_llm.ops.torch_private import keeps_compiled_code, mark_static_address
from compiled_llm.scheduling.bucket import Bucket, buckets_of
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import WorkerFailedError
from compiled_llm.step.drafting import num_draft_layers
from compiled_llm.step.kv_cache import of_states, split_by_window
from compiled_llm.step.logits_transforms import LogitsTransform
from compiled_llm.step.logprobs import LogprobRows
from compiled_llm.step.step import Feedback, step_function
from compiled_llm.system.progress import Stage, StartProgress
from compiled_llm.system.resources import granted_cores, release_freed_memory
from compiled_llm.worker import graph_fields
from compiled_llm.worker.block_copies import Caches
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.draft_network import DraftNetwork
from compiled_llm.worker.draft_stage import DraftStage, NetworkStage, StepOutputs
from compiled_llm.worker.draft_trees import move_accepted
from compiled_llm.worker.head_stage import network_stage
from compiled_llm.worker.layer_skip_stage import LayerSkipStage
from compiled_llm.worker.passed_on import PassedOn
from compiled_llm.worker.pool_sizes import PoolSizes
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sampling_stage import SamplingNeeds, SamplingStage
from compiled_llm.worker.step_buffers import StepBuffers, StepSizes, mark_sizes

_SECONDS_A_CALL = 0.1  # of a compiled function that is on disk: loading it, and calling it once
_NO_BOUND = 1 << 30  # tokens of a request in a step
# How long a graph takes to compile beside others: as long as this in seconds on some machine.
_STEP_WEIGHT, _LAYER_WEIGHT, _SAMPLER_WEIGHT = 6.0, 0.5, 4.0
# Of processes that compile while requests are served: two fifths of a core that both want. With a tenth (10) a server
# of two cores that is never idle had not changed over after 100 s.
_NICENESS = 2
# Seconds that a request which comes at once has for its first step, before graphs are loaded beside it.
_HEAD_START = 1.0


class CompiledSteps:
    """The steps of an engine. ``compile`` comes first; then each bucket can run.

    Args:
        dtype: the model's.
        kv_cache: to compile on; ``record_again`` exchanges it.
        pool_sizes: of the KV pool.
        graph_pool: of CUDA graphs that are captured by hand; None where torch makes them or there are none.
        drafter: a network that drafts, with its cache to compile on.

    Attributes:
        buckets: all, smallest first.
        buffers: the inputs of each bucket.
        tables: on a GPU, the block tables of all requests.
        last_tokens: ``[R]`` int64 on the device: the tokens that the last step chose.
        hidden: ``[T, D]`` on the device: what the head took in the last step, of all its tokens, or of those that it
            kept. Of a stage before the next step: what that begins with.
        keeps_all_rows: whether each step keeps all; as it is, a CPU's do where a drafter or prompts need them.
        taken: ``[T, taps * D]``, the inputs of layers that a drafter reads; None where it reads none, or its cache has
            them.
        cache: where compiled functions are kept on disk; None before ``compile``, and where they are not kept.
        serves_before: whether steps run before all is compiled.
        has_changed: whether the last function was compiled since somebody looked, who sets it back.
        build_seconds: in which ``compile`` waited for other processes.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        limits: EngineLimits,
        device: torch.device,
        dtype: torch.dtype,
        weights: Any,
        kv_cache: KVCache,
        pool_sizes: PoolSizes,
        *,
        transforms: tuple[LogitsTransform, ...] = (),
        graph_pool: GraphPool | None = None,
        drafter: tuple[DraftNetwork, KVCache] | None = None,
    ) -> None:
        self.model_config, self.limits, self.device = model_config, limits, device
        self.weights, self.kv_cache, self.pool_sizes = weights, kv_cache, pool_sizes
        self._windows = tuple(size.window for size in pool_sizes.windows)
        self._plain_weights = without_adapters(weights)
        self.used_experts = used_experts(weights)
        self.buckets = buckets_of(limits)
        self.tables = BlockTables(limits, device, len(self._windows)) if device.type == "cuda" else None
        self.uses_trees = device.type == "cuda" and graph_pool is None and not config.enforce_eager
        # A recorded graph has one size, and features are kept of all tokens of a bucket.
        has_features = drafter is not None and bool(drafter[1]) and isinstance(drafter[1][-1], FeatureCache)
        pads = device.type != "cpu" or graph_pool is not None or has_features
        self._taps = () if drafter is None else drafter[0].taps
        self._keeps_hidden = drafter is not None and bool(drafter[1]) and isinstance(drafter[1][-1], HiddenCache)
        self.keeps_all_rows = False
        reads_all = drafter is not None and drafter[0].reads_every_row(model_config.num_layers)
        self._keeps_rows = is_last(model_config) and not (pads or reads_all)
        of_all: tuple[Any, ...] = limits, device, self._windows, self.tables, self.uses_trees, pads, self._keeps_rows
        self.buffers = {bucket: StepBuffers(bucket, *of_all) for bucket in self.buckets}
        num_rows = max(bucket.num_rows for bucket in self.buckets)
        num_tokens = max(bucket.num_tokens for bucket in self.buckets)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.hidden = native.zeros_on(device, (num_tokens, model_config.hidden_size), dtype)
        for tensor in (self.last_tokens, self.hidden):
            mark_static_address(tensor)
        sizes = StepSizes.of(limits, device, self.uses_trees)
        mark_sizes(self.last_tokens, sizes.most_rows)
        mark_sizes(self.hidden, sizes.most_tokens)
        is_taken = bool(self._taps) and not self._keeps_hidden
        self.taken = _buffer_of_taps(self.hidden, len(self._taps), sizes) if is_taken else None
        for table in weights.ropes if model_config.ropes else ():  # those of transformers' code are other constants
            if len(table) == limits.max_model_len:  # a row for each position
                mark_sizes(table, sizes.positions)
        self.sampling = (
            SamplingStage(
                model_config,
                limits,
                device,
                last_tokens=self.last_tokens,
                hidden=self.hidden,
                transforms=transforms,
                max_logprobs=config.max_logprobs,
                dtype=dtype,
                uses_trees=self.uses_trees,
                records=graph_pool is not None,
                head=shared_head(weights),
            )
            if is_last(model_config)
            else PassedOn()
        )
        self.cache: CompileCache | None = None
        self.serves_before, self.has_changed, self.build_seconds = False, False, 0.0
        self._config, self._transforms, self._dtype = config, transforms, dtype
        self._cache_dtypes: tuple[torch.dtype, ...] = ()  # of each layer's KV cache, from ``compile`` on
        self._exact_attention = config.exact and device.type == "cuda"  # a CPU's one kernel is exact
        self.drafting = self._drafting(drafter)
        self._graph_pool = graph_pool
        self._move_accepted: Callable[[SchedulerOutput], None] | None = None
        self._slot = 0  # of the tokens of the last step
        self._host_tokens: tuple[Tensor, Tensor] | None = None
        self._functions: dict[str, CompiledFunction] = {}
        self._builds: BackgroundBuilds | None = None  # while functions are uncompiled that will not stay so
        self._has_run = False  # since the head start of the builds
        self._ready_time = 0.0
        self._last_report: CompileReport | None = None  # once closed

    def _drafting(self, drafter: tuple[DraftNetwork, KVCache] | None) -> DraftStage | None:
        """What drafts behind each step: ``drafter``, the first layers of the model, or nothing."""
        of_all = self.limits, self.device, self._dtype
        shared: dict[str, Any] = {"tables": self.tables, "exact": self._exact_attention}
        if drafter is not None:
            slots = {bucket: buffers.step_input.slot_mapping for bucket, buffers in self.buffers.items()}
            hidden = self.hidden if self.taken is None else self.taken
            step = StepOutputs(self.last_tokens, hidden, slots, self._has_all_rows_of)
            shared |= {"vocab_size": self.model_config.vocab_size, "kv_cache": drafter[1], "step": step}
            stage = network_stage(drafter[0], *of_all, **shared)
            stage.hold(self.kv_cache, drafter[1])
            return stage
        num_layers = num_draft_layers(self._config.speculation, self.model_config)
        if not num_layers:
            return None
        shared |= {"weights": self._plain_weights, "kv_cache": self.kv_cache, "windows": self._windows}
        shared["last_tokens"] = self.last_tokens
        return LayerSkipStage(self._config, num_layers, self.model_config, *of_all, **shared)

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs on the device, weights and KV cache left out."""
        pieces = [buffers.nbytes for buffers in self.buffers.values()]
        tables = 0 if self.tables is None else self.tables.nbytes
        pieces += [] if self.drafting is None else [self.drafting.nbytes]
        taken = 0 if self.taken is None else self.taken.nbytes
        return sum(pieces) + tables + self.sampling.nbytes + self.last_tokens.nbytes + self.hidden.nbytes + taken

    @property
    def has_all_rows(self) -> bool:
        """Whether ``hidden`` has all tokens of each step."""
        return self.keeps_all_rows or not self._keeps_rows

    def _has_all_rows_of(self, output: SchedulerOutput) -> bool:
        """Whether ``hidden`` has all tokens of this step; else those alone whose logits it computes."""
        return self.has_all_rows or bool(output.prompt_targets)

    @property
    def unwritten_bytes(self) -> int:
        """Those of ``nbytes`` for which a host gives memory as they are first written."""
        return self.sampling.unwritten_bytes + (self.hidden.nbytes if self.device.type == "cpu" else 0)

    @property
    def bytes_behind_largest(self) -> int:
        """Most that is taken behind the largest step by what ``run_largest`` leaves out there.

        That is sampling, with its logits in float32, and then the log-probabilities of prompts.
        """
        if not is_last(self.model_config):
            return 0
        largest = self.buckets[-1]
        sampled = largest.num_rows * self.model_config.vocab_size * 4 if largest.kind != "decode" else 0
        return max(sampled, self.sampling.bytes_of_prompts)

    def cache_groups(self) -> list[Caches]:
        """The KV cache's tensors of layers without a window, of those with each window, and of those with a state.

        All that a drafter keeps is among the first.
        """
        groups = split_by_window(self.model_config, self._windows, self.kv_cache)
        groups[0] += [] if self.drafting is None else self.drafting.kv_cache
        groups.append(of_states(self.model_config, self.kv_cache))
        return [tensors(tuple(group)) for group in groups]

    def move_keys(self, output: SchedulerOutput) -> None:
        """Move keys and values of accepted drafts, where ``output`` says so."""
        if output.moved_keys:
            self._move_accepted = self._move_accepted or self._moves()
            self._move_accepted(output)

    def _moves(self) -> Callable[[SchedulerOutput], None]:
        """``move_accepted`` with the caches that are held. To find these takes longer than to move keys."""
        kept = () if self.drafting is None else self.drafting.kv_cache
        features = kept[-1][0] if kept and isinstance(kept[-1], FeatureCache | HiddenCache) else None
        groups = split_by_window(self.model_config, self._windows, self.kv_cache)
        latent = any(spec.latent_dim for spec in attention_layers(layers_of(self.model_config)))
        return functools.partial(move_accepted, groups=groups, features=features, latent=latent)

    def hold(self, kv_cache: KVCache, draft_cache: KVCache = ()) -> None:
        """Take other caches in the place of those so far: see ``record_again``."""
        self.kv_cache, self._move_accepted = kv_cache, None
        if self.drafting is not None:
            self.drafting.hold(kv_cache, draft_cache)

    def undo(self, bucket: Bucket) -> Callable[[], None]:
        """What will take back the bucket's next step: its last tokens, and the states that it writes in place."""
        kept: list[tuple[Tensor, Any, Tensor]] = [(self.last_tokens, slice(None), self.last_tokens.clone())]
        states = self.buffers[bucket].step_input.states
        if states is not None:
            slots = states.write_slot.unique().long()
            kept += [(states_of_layer, slots, states_of_layer[slots]) for states_of_layer in self.cache_groups()[-1]]

        def take_back() -> None:
            for tensor, rows, values in kept:
                tensor[rows] = values

        return take_back

    def report(self) -> CompileReport:
        """What compiling each function gave."""
        if self._last_report is not None:
            return self._last_report
        return CompileReport(tuple(function.report() for function in self._all_functions().values()))

    def _all_functions(self) -> dict[str, CompiledFunction]:
        own = {**self._functions, **self.sampling.functions()}
        return own if self.drafting is None else own | self.drafting.functions()

    def close(self) -> None:
        """Free weights, KV cache and graphs; ``report`` stays as it is then. What is being compiled is given up."""
        if self._builds is not None:
            self._builds.close()
            self._builds = None
        self._last_report = self.report()
        self._functions.clear()
        self.buffers.clear()
        self._move_accepted = None
        del (
            self.sampling,
            self.weights,
            self._plain_weights,
            self.kv_cache,
            self.used_experts,
            self.tables,
            self.drafting,
        )

    # -- Compiling

    def compile(
        self,
        cache_dtypes: Sequence[torch.dtype],
        *,
        enforce_eager: bool,
        num_workers: int | None,
        progress: StartProgress,
        processes: BuildProcesses | None = None,
        before_first_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile the steps of all buckets and what runs after them, and run each once on a step that is all padding.

        Where nobody waits for that, nothing runs: functions are uncompiled until ``change_over`` finds them compiled.

        Args:
            cache_dtypes: of each layer's KV cache.
            num_workers: processes that compile at the same time; None: as many as pay.
            processes: those that were started ahead (``build_ahead.py``).
            before_first_step: called once other processes have compiled; the ops need their kernels from then on.
        """
        keeps = not (enforce_eager or self.uses_trees) and keeps_compiled_code()
        # Only where other processes can compile everything.
        others_compile = keeps and self.device.type == "cpu" and self._graph_pool is None and num_workers != 0
        self.serves_before = others_compile and not (self._transforms or self._config.waits_for_compile)
        target = gpu_target(self._graph_pool)
        self.cache = engine_cache(target) if keeps else None
        self._cache_dtypes = tuple(cache_dtypes)
        jobs = [] if enforce_eager else self.jobs()
        if self.cache is not None and self.serves_before:
            before_first_step()
            with progress.stage("", {}) as stage:
                self._warm_up(enforce_eager, stage, is_awaited=False)
            # One core is left to requests. Where there is only one, they share it: see ``_NICENESS``.
            workers = max(1, granted_cores() - 1) if num_workers is None else num_workers
            self._ready_time = time.monotonic()
            processes = BuildProcesses(niceness=_NICENESS)
            self._builds = BackgroundBuilds(self.cache, jobs, workers, processes, _HEAD_START)
            return
        left: dict[str, Cost | None] = dict.fromkeys(job.name for job in jobs)  # what this process has to compile
        if self.cache is not None:
            processes = processes or BuildProcesses(target)
            is_gpu, started = target is not None, time.perf_counter()
            left = build_missing(self.cache, jobs, num_workers, progress, processes, needs_process=is_gpu)
            self.build_seconds = time.perf_counter() - started
        if not enforce_eager:
            left |= dict.fromkeys(self.sampling.uncached())
        before_first_step()
        known = {name: cost.seconds(granted_cores()) for name, cost in left.items() if cost is not None}
        weights = {job.name: job.weight if job.name in left else _SECONDS_A_CALL for job in jobs}
        weights |= {name: _SAMPLER_WEIGHT for name in left if name not in weights} | known
        title = "compiling graphs" if left else "loading compiled graphs"
        if left and len(left) < len(weights):
            title = f"compiling {len(left)} graphs, loading {len(weights) - len(left)}"
        foreseen = len(known) == len(left)
        seconds = sum(weights.values()) if left and foreseen else None
        with progress.stage(title, weights, seconds=seconds, foreseen=foreseen, is_long=bool(left)) as stage:
            self._warm_up(enforce_eager, stage)

    def change_over(self) -> None:
        """Let code that is there by now take the place of uncompiled functions; between two steps.

        Raises:
            WorkerFailedError: a function could not be compiled. From then on each call says so.
        """
        if self._builds is None:
            return
        if self._has_run:
            self._builds.begin()
            self._has_run = False
        if not self._builds.finished:
            return
        functions, finished = self._all_functions(), self._builds.finished
        while finished:
            name, error = finished[0].job.name, finished[0].error
            if error:
                raise WorkerFailedError(
                    f"{name} could not be compiled: {error}. wait_for_compile=True compiles it before anything is "
                    "served, enforce_eager=True serves without compiling"
                )
            functions[name].take_over(finished.popleft(), time.monotonic() - self._ready_time)
        if not any(function.is_pending for function in functions.values()):
            self._builds.close()
            self._builds = None
            self.has_changed = True

    @property
    def is_changing(self) -> bool:
        """Whether functions are uncompiled that will not stay so."""
        if self._builds is None:
            return False
        return not (self._builds.finished and self._builds.finished[0].error)

    def uncompiled(self, cache_dtypes: Sequence[torch.dtype]) -> "CompiledSteps":
        """These steps without compiling, on the same weights and KV cache."""
        steps = CompiledSteps(
            dataclasses.replace(self._config, enforce_eager=True, cuda_graphs="auto"),
            self.model_config,
            self.limits,
            self.device,
            self._dtype,
            self.weights,
            self.kv_cache,
            self.pool_sizes,
            transforms=self._transforms,
            drafter=(self.drafting.network, self.drafting.kv_cache)
            if isinstance(self.drafting, NetworkStage)
            else None,
        )
        steps.compile(cache_dtypes, enforce_eager=True, num_workers=None, progress=StartProgress("off"))
        if isinstance(steps.drafting, NetworkStage) and isinstance(self.drafting, NetworkStage):
            steps.drafting.coverage = self.drafting.coverage
        return steps

    def _warm_up(self, enforce_eager: bool, stage: Stage, *, is_awaited: bool = True) -> None:
        def make(function: Callable, name: str, depends: Fields, keep: bool = True) -> CompiledFunction:
            stage.next(name)
            cache = self.cache if keep else None
            options: dict[str, Any] = {"graph_pool": self._graph_pool, "cache": cache, "depends": depends}
            return CompiledFunction(function, name, self.device, enforce_eager, **options, is_awaited=is_awaited)

        for bucket in self._recording_order():
            name = self._name(bucket)
            if name not in self._functions:
                self._functions[name] = make(self._recipe(bucket)(), name, self._depends())
                self._functions[name].warm_up(functools.partial(self.step_arguments, bucket))
            logits: Callable[[], Tensor] = functools.partial(self.run_step, bucket)
            if self.device.type == "cpu":  # there, what follows a step is not recorded with it: one step does for all
                logits = functools.cache(logits)
            self.sampling.warm_up(bucket, self.buffers[bucket].sampling_input, logits, make)
        self.sampling.warm_up_prompts(self.weights, make)
        if self.drafting is not None:
            self.drafting.warm_up(make)

    def _name(self, bucket: Bucket) -> str:
        """Of the function that runs a bucket's steps: on a CPU one for all, see ``StepSizes``."""
        return "step" if self.device.type == "cpu" and self._graph_pool is None else bucket.name

    def _recipe(self, bucket: Bucket) -> functools.partial:
        """Makes the step of a bucket, in any process."""
        # Where one graph serves all buckets, it serves any: the ops of a CPU ask for no bound.
        most = _NO_BOUND if self._name(bucket) == "step" else bucket.max_query_len
        of_all = self.model_config, most, self._exact_attention
        return functools.partial(step_function, *of_all, self._windows, self._taps)

    def _depends(self) -> Fields:
        """What a step depends on."""
        return graph_fields.of_step(self.model_config, self.limits, self._dtype, self._cache_dtypes, self.device)

    def jobs(self) -> list[Job]:
        """Everything to compile, for other processes. Logits are described, since no step has run yet."""
        threads = torch.get_num_threads()
        steps = {self._name(bucket): bucket for bucket in self.buckets}
        weight = _STEP_WEIGHT + _LAYER_WEIGHT * self.model_config.num_layers
        jobs = [
            Job(name, self._recipe(bucket), self.step_arguments(bucket), threads, weight, self._depends())
            for name, bucket in steps.items()
        ]
        inputs = {bucket.num_rows: self.buffers[bucket].sampling_input for bucket in self.buckets}
        logits = functools.partial(torch.empty, dtype=self._dtype, device=self.device)
        jobs += self.sampling.jobs(inputs, logits, self.weights, _SAMPLER_WEIGHT)
        if self.drafting is None:
            return jobs
        return jobs + self.drafting.jobs(_STEP_WEIGHT, _LAYER_WEIGHT)

    def drop_graphs(self) -> None:
        """Free what graphs captured by hand hold, which ``record_again`` takes anew. Torch's own stay."""
        if self._graph_pool is None:
            return
        for function in self._all_functions().values():
            function.drop_graphs()
        self._graph_pool.renew()

    def record_again(self, kv_cache: KVCache, draft_cache: KVCache = ()) -> None:
        """Take another KV cache; on a GPU, record every CUDA graph on it. Nothing is compiled.

        ``draft_cache``: of the network that drafts, if there is one.
        """
        self.hold(kv_cache, draft_cache)
        if self.drafting is not None:
            self.drafting.record_again()
        for bucket in self._recording_order():
            self._functions[self._name(bucket)].record_again(functools.partial(self.step_arguments, bucket))
            logits = functools.partial(self.run_step, bucket)
            self.sampling.record_again(bucket, self.buffers[bucket].sampling_input, logits)
        self.sampling.record_prompts_again(self.weights)

    def _recording_order(self) -> list[Bucket]:
        """The largest first where graphs share memory, so that the others fit into what it took."""
        return self.buckets if self._graph_pool is None else self.buckets[::-1]

    # -- Running

    def fill(self, bucket: Bucket, output: SchedulerOutput, store: RequestRows) -> tuple[np.ndarray, int]:
        """Write a step. Returns the rows ``[R]`` int64 of its requests in ``store``, and the number of logits rows."""
        rows = store.update(output)
        self._slot = 1 - self._slot
        return rows, self.buffers[bucket].fill(output, rows, store, self._slot, keeps_all=self._has_all_rows_of(output))

    def step_arguments(self, bucket: Bucket) -> tuple[Any, StepInput, KVCache, Feedback]:
        """What the compiled step of ``bucket`` is called with, each time."""
        buffers = self.buffers[bucket]
        kept = self.drafting.kv_cache[-1].hidden if self._keeps_hidden and self.drafting is not None else None
        feedback = Feedback(buffers.feedback, self.last_tokens, self.hidden, self.taken, kept)
        weights = self._plain_weights if bucket.adapters is False else self.weights
        return weights, buffers.step_input, self.kv_cache, feedback

    def leave_tokens_in(self, hosts: Sequence[Tensor]) -> None:
        """Have graphs leave the tokens of a step in one of two ``hosts`` by themselves: pinned, as ``last_tokens``.

        And take inputs by themselves. If the engine's arguments ask for it; before ``compile``.
        """
        pool = self._graph_pool
        if pool is None or not pool.pinned or not hosts:
            return
        first, second = self._host_tokens = hosts[0], hosts[1]
        chosen = torch.zeros(1, dtype=torch.int32, device=self.device)
        of_steps = {id(buffers.step_input): buffers for buffers in self.buffers.values()}
        taking = set[int]()  # of those: the graphs that take what was filled

        def begin(args: tuple) -> None:
            if id(args[1]) in of_steps and of_steps[id(args[1])].begin_graph(chosen):
                taking.add(id(args[1]))

        of_samplers = {id(buffers.sampling_input): id(buffers.step_input) for buffers in self.buffers.values()}

        def end(args: tuple) -> None:
            if of_samplers.get(id(args[1]), id(args[1])) in taking:
                give(self.last_tokens, (first, second), chosen)

        pool.before, pool.after = begin, end

    def tokens_of_step(self, bucket: Bucket) -> Tensor | None:
        """Where the graph of the step that was just started leaves its tokens; None: they are to be copied."""
        if self._host_tokens is None or not self.buffers[bucket].is_taken:
            return None
        return self._host_tokens[self._slot]

    def run_step(self, bucket: Bucket) -> Tensor:
        """Run the model on the step in the bucket's buffers: its logits; ``last_tokens`` has the likeliest tokens."""
        self._has_run = True
        self.buffers[bucket].start_graph()
        return self._functions[self._name(bucket)](*self.step_arguments(bucket))

    def run(
        self, bucket: Bucket, needs: SamplingNeeds, around: Callable[[Callable[[], Tensor]], Tensor] | None = None
    ) -> LogprobRows | None:
        """Run the step in the bucket's buffers. Its tokens are in ``last_tokens`` then; returns log-probabilities.

        ``around`` runs the step, if it is given, and returns its logits.
        """
        if self.uses_trees:
            begin_step_of_trees()
        logits = self.run_step(bucket) if around is None else around(functools.partial(self.run_step, bucket))
        return self.sampling.run(bucket, self.buffers[bucket].sampling_input, logits, needs)

    def run_largest(self) -> None:
        """Run the largest bucket of each kind, all padding: what a step allocates depends on its bucket alone.

        What samples runs behind decodes. Behind the largest step it takes ``bytes_behind_largest`` more, which would be
        the most memory that a start takes, as would what decodes have freed.
        """
        largest = self.buckets[-1]
        for bucket in {bucket.kind: bucket for bucket in self.buckets}.values():
            behind = bucket is not largest or bucket.kind == "decode"
            self.run(bucket, SamplingNeeds(sampling=behind, changed_logits=behind, logprobs=behind))
            release_freed_memory()
        if self.drafting is not None:
            self.drafting.run_largest()


def _buffer_of_taps(hidden: Tensor, count: int, sizes: StepSizes) -> Tensor:
    """For what so many taps read of as many tokens as ``hidden`` has."""
    taken = hidden.new_zeros(len(hidden), count * hidden.shape[1])
    mark_static_address(taken)
    return mark_sizes(taken, sizes.most_tokens)
