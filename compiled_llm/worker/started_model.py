"""StartedModel: a model on its device. Makes weights, KV cache and compiled steps, and measures what they take."""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from compiled_llm.adapters.host_adapters import adaptable
from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.draft_model import DraftCheckpoint
from compiled_llm.checkpoint.keeping import Keeping
from compiled_llm.checkpoint.kept_weights import KeptWeights
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.compiling.compiler import check_torch
from compiled_llm.compiling.cuda_graphs import GraphPool, gpu_target, graph_pool
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.libraries import use_own_cache_directory
from compiled_llm.compiling.report import CompileReport
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import prefix_of
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.last_layer import LastLayer, last_layer
from compiled_llm.models.linears.adapted import Adaptable, change_bytes
from compiled_llm.models.linears.published import rounds_activations
from compiled_llm.models.linears.sharded import Sharding
from compiled_llm.models.quantized.described import described
from compiled_llm.models.registry import code_of, family_of
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.models.stages import OwnLayers, own_weights
from compiled_llm.models.weights import experts, tensors
from compiled_llm.ops import RankGroup, native
from compiled_llm.ops.parallel.reductions import least
from compiled_llm.ops.torch_private import mark_static_address
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.scheduling.worker import WorkerFacts, WorkerFailedError
from compiled_llm.step.drafting import num_draft_layers
from compiled_llm.step.kv_cache import allocate, layer_dtypes, num_tensors, short_windows
from compiled_llm.step.logits_transforms import load_transforms
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.resources import release_freed_memory
from compiled_llm.tiers.file_thread import FileThread
from compiled_llm.worker import exactness
from compiled_llm.worker.block_copies import Layout, SwapSpace
from compiled_llm.worker.build_ahead import Builds, start_builds
from compiled_llm.worker.calibration import worker_facts
from compiled_llm.worker.compiled_steps import CompiledSteps
from compiled_llm.worker.cpu_kernels import KernelBuild
from compiled_llm.worker.device import (
    STEP_DEFAULTS,
    choose_threads,
    resolve_device,
    say_cost_of_dtype,
    say_cost_of_rounding,
    use_device,
    use_threads,
)
from compiled_llm.worker.draft_network import DraftNetwork, DraftPlan
from compiled_llm.worker.draft_stage import NetworkStage
from compiled_llm.worker.draft_trees import with_drafts
from compiled_llm.worker.launched_step import HostSlot
from compiled_llm.worker.mapped_weights import keeping, map_weights
from compiled_llm.worker.memory import (
    TRIAL_BLOCKS,
    StartMemory,
    check_room_for_weights,
    estimated_activations,
    num_bytes,
)
from compiled_llm.worker.offloaded_weights import offloaded
from compiled_llm.worker.pool_pages import PoolPages
from compiled_llm.worker.pool_sizes import PoolSizes, with_state_slots
from compiled_llm.worker.rank_gpus import GpuOfRank, check_ranks_on_gpus, close_group, gpu_group
from compiled_llm.worker.rank_start import CompileTurn, in_turns
from compiled_llm.worker.read_ahead import ReadAhead
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.shared_rows import SharedSwapSpace
from compiled_llm.worker.tier_files import open_files
from compiled_llm.worker.times import RunnerTimes, StartTimes


class StartedModel:
    """A model on its device: after construction every bucket is compiled, and the KV pool is there.

    Args:
        num_draft_tokens: most tokens that a drafter proposes for a request and step.
        drafter: a network that does so behind each step; None: the host drafts, or nobody.
        shard: what this process has of a model that several ranks share; None: all of it.
        group: of all ranks, by memory of the host.
        peers: all processes that share the model: ranks, stages; None: the ranks.
        rows: the descriptor of memory for rows of host memory that ranks have in common; None: each has its own.
        gpu: of a rank on a GPU, with the descriptor of a file in which ranks meet (``gpu_group``).

    Attributes:
        model_config: the whole model's, with the layers of a stage (``models/stages.py``).
        dtype: of weights and activations; ``cache_dtypes``: of each layer's KV cache.
        linears: the kind of linear layer that the weights are kept in.
        files: of blocks; None: there is no disk for them.
        adapters: those in host memory; None: the engine serves none.
        exact: whether numbers are the same to the bit in any company: "yes", or "no" and why.
        pool_sizes: what the KV pool takes; swap_space: host memory for its blocks.
        rows: what is known of the running requests; num_threads: threads that compute on a CPU.
        read_ahead: of weights that are mapped from a file; None: they are in memory.
        pool_pages: of the KV pool, on a CPU.
        memory_ledger, weight_bytes, start_times, times: for reports. The drafter's weights are in the ledger alone.

    Raises:
        ValueError: an argument, the checkpoint or the memory does not allow it; the message says what would.
    """

    facts: WorkerFacts
    pool_sizes: PoolSizes
    files: FileThread | None = None
    read_ahead: ReadAhead | None = None
    pool_pages: PoolPages | None = None

    @own_settings()  # tensors made under inference mode, for example, could not be written outside of it
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        progress: StartProgress,
        num_draft_tokens: int = 0,
        drafter: DraftCheckpoint | None = None,
        shard: Shard | None = None,
        group: RankGroup | None = None,
        peers: RankGroup | None = None,
        rows: int | None = None,
        gpu: tuple[GpuOfRank, int | None] | None = None,
    ) -> None:
        started = time.perf_counter()
        self.device = resolve_device(config.device)
        self._set_rank(config, model_config, shard, group, peers)
        check_torch(self.device, config.enforce_eager)
        self.num_threads = use_threads(choose_threads(config.num_threads))
        pool = self._graph_pool(config)
        self.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        self.cache_dtypes = layer_dtypes(config, self.dtype, model_config)
        use_device(self.device, self.cache_dtypes, model_config)
        self._set_group(gpu)
        limits = EngineLimits.resolve(config, model_config.max_position_embeddings, STEP_DEFAULTS[self.device.type])
        limits = with_state_slots(limits, config, self._own_config, self.dtype)
        self.limits = with_drafts(limits, num_draft_tokens, config, model_config, self.device)
        self.start_times, self.times = StartTimes(), RunnerTimes()
        if not config.enforce_eager or self.device.type != "cpu":  # else there is no code in it that this engine runs
            use_own_cache_directory()
        self.linears = linears_of(config, model_config, self.device, self.dtype)
        num_draft_layers(config.speculation, model_config)  # refuses what cannot be, before weights are read
        self._directory, self._drafter = directory, drafter
        sizes = limits.max_model_len, self.device, self.dtype
        self._draft = draft = None if drafter is None else DraftPlan.of(drafter, model_config, *sizes)
        self._kept = keeping(config, self.device, self.linears)
        self._offloaded = offloaded(config, model_config, self.device, self.linears, self.dtype)
        taken = self._kept if self._offloaded is None else self._offloaded.kind
        self._taken, self.adapters = adaptable(taken, config)
        if self.model_config.own_layers is not None:
            self._taken = OwnLayers.of(self.model_config, self._taken)
        if self.shard is not None:
            self._taken = Sharding(self._taken, self.shard, self.group)
        builds = None if self._turn.waits else self._start_builds(config, progress, gpu_target(pool))
        self.start_times.device = time.perf_counter() - started
        self.exact = exactness.described(exactness.obstacles(config, self.device, self.linears, model_config))
        memory = self._start_memory(config, draft)
        weights = self._load_weights(config, directory, progress, memory)
        network = None if draft is None else self._load_network(config, draft, progress, weights)
        memory.check()
        self.transforms = load_transforms(config.logits_transforms, model_config.vocab_size, self.device)
        num_windows = len(self.pool_sizes.windows)
        self.rows = RequestRows(self.limits, model_config.vocab_size, self.transforms, num_windows=num_windows)
        kv_cache = self._allocate(TRIAL_BLOCKS - 1, TRIAL_BLOCKS - 1)
        self.steps = CompiledSteps(
            config,
            self._own_config,
            self.limits,
            self.device,
            self.dtype,
            weights,
            kv_cache,
            self.pool_sizes,
            transforms=self.transforms,
            graph_pool=pool,
            drafter=None if network is None else (network, self._allocate_for_drafter(TRIAL_BLOCKS - 1)),
        )
        self.swap_space = self._make_swap_space(config, rows)
        drafts = None if self.steps.drafting is None else self.steps.drafting.token_ids
        self._host_slots = HostSlot.in_turns(self.steps.last_tokens, drafts, self.device)
        self.steps.leave_tokens_in([slot.tokens for slot in self._host_slots])
        memory.before_compiling()
        if self._turn.waits:
            least(0, self._host_group)  # until the first rank has compiled: what it made is on disk
            builds = self._start_builds(config, progress, gpu_target(pool))
        self._compile(config, builds, progress)
        compiled = time.perf_counter()
        self.facts = self._make_pool(config, memory, progress)
        self.start_times.pool = time.perf_counter() - compiled

    def close(self) -> None:
        """Free weights, KV cache and graphs; ``compile_report`` stays as it is then."""
        if self.files is not None:
            self.files.close()
        self.steps.close()
        self.pool_pages = None
        if self.read_ahead is not None:
            self.read_ahead.close()
        if self._offloaded is not None:
            self._offloaded.memory.close()
        del self.swap_space
        if self.group is not self._host_group:
            close_group(self.group)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Steps run uncompiled meanwhile, on the same weights and KV cache. No request may be unfinished."""
        compiled = self.steps
        try:
            with own_settings(self.num_threads):
                self.steps = compiled.uncompiled(self.cache_dtypes)
            yield
        finally:
            uncompiled, self.steps = self.steps, compiled
            if uncompiled is not compiled:
                uncompiled.close()

    # -- What it is and did

    def compile_report(self) -> CompileReport:
        """What compiling each function gave. For between two steps: what is compiled by now takes its place."""
        with contextlib.suppress(WorkerFailedError):  # which the next step raises
            self.steps.change_over()
        return self.steps.report()

    def describe_start(self) -> str:
        """What the start did, how long that took, and whether the engine is exact, in a line."""
        took = self.start_times.describe(self.compile_report())
        checkpoint = ""
        if self.model_config.published:
            published = json.loads(self.model_config.published)
            checkpoint = f"; checkpoint: {described(published, rounds_activations(self.linears))}"
        return f"{took}; model: {code_of(self.model_config)}{checkpoint}; same results in any batch: {self.exact}"

    def compiled_files(self) -> list[Path]:
        """The files that hold this engine's compiled functions. ``ValueError`` on a GPU: kernels are kept elsewhere."""
        if self.steps.cache is None or self.device.type != "cpu":
            raise ValueError(
                f"compiled functions can be taken elsewhere from a CPU only, given device={str(self.device)!r}"
            )
        return self.steps.cache.used

    @property
    def kv_cache_bytes(self) -> int:
        return num_bytes(self.steps.kv_cache)

    @property
    def host_layout(self) -> Layout:
        """That of ``swap_space``."""
        return self.swap_space.layout

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return int(self.peers.place[1])

    # -- Starting

    def _set_rank(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        shard: Shard | None,
        group: RankGroup | None,
        peers: RankGroup | None,
    ) -> None:
        if shard is None and config.tensor_parallel_exact:
            shard = Shard(0, 1, exact=True)
        self._host_group = RankGroup.alone() if group is None else group
        self.shard = shard
        self.peers = self._host_group if peers is None else peers
        self._turn = CompileTurn(shard, self._host_group)
        self.model_config = model_config
        self._own_config = model_config if shard is None else rank_config(model_config, shard)
        if self.device.type == "cuda" and (self.shard is not None or self.num_ranks > 1):
            check_ranks_on_gpus(config)

    def _set_group(self, gpu: tuple[GpuOfRank, int | None] | None) -> None:
        """That of the layers; and how many processes share the memory of the device."""
        self.group, self._sharing = self._host_group, self.num_ranks
        if gpu is not None:
            self.group = gpu_group(self._host_group, gpu[0], self.device, gpu[1])
            self._sharing = self.num_ranks if gpu[0].shared else 1

    def _graph_pool(self, config: EngineConfig) -> GraphPool | None:
        in_order = config.cpu_offload_gb > 0 or self.num_ranks > 1
        return graph_pool(config.cuda_graphs, self.device, config.enforce_eager, in_order)

    def _start_builds(self, config: EngineConfig, progress: StartProgress, target: GpuTarget | None) -> Builds | None:
        sizes = self.limits, self.dtype, self.cache_dtypes
        draft_ops = [] if self._draft is None or self.device.type != "cpu" else self._draft.cpu_ops()
        return start_builds(config, self.device, self.model_config, *sizes, self._taken, progress, target, draft_ops)

    def _start_memory(self, config: EngineConfig, draft: DraftPlan | None) -> StartMemory:
        """Sets ``pool_sizes``, too."""
        drafted = 0 if draft is None else draft.token_bytes
        self.pool_sizes = PoolSizes.of(self._own_config, self.cache_dtypes, self.limits, self.dtype, drafted)
        kind = self.linears if self.shard is None else self._taken
        activations = estimated_activations(self.model_config, self.limits, self.dtype, kind)
        return StartMemory(
            config,
            self.limits,
            self.device,
            self.pool_sizes,
            num_tensors(self._own_config, self.cache_dtypes) + (0 if draft is None else draft.num_cache_tensors),
            activations if draft is None else max(activations, draft.activations(self.limits)),
            self.num_ranks,
            self._sharing,
        )

    def _load_weights(self, config: EngineConfig, directory: Path, progress: StartProgress, memory: StartMemory) -> Any:
        say_cost_of_dtype(progress, self.device, self.dtype, config.dtype)
        started = time.perf_counter()
        # No position beyond max_model_len is ever asked for.
        c = dataclasses.replace(self.model_config, max_position_embeddings=self.limits.max_model_len)
        description = family_of(c).describe(c, self.dtype, self._taken)
        adaptable = self._taken.plain if isinstance(self._taken, Sharding) else self._taken
        if isinstance(adaptable, Adaptable):
            adaptable.check_targets()
        if config.enable_expert_parallel and not experts(description.weights):
            raise ValueError(
                f"enable_expert_parallel must be False for {c.architecture}, which has no experts, given True"
            )
        of_place = self.device, self.dtype, self._sharing
        described, elsewhere = own_weights(description.weights, c), 0
        if self._offloaded is not None:
            described = self._offloaded.over_buffers(described, torch.device("meta"))
            self._offloaded.check_room()
            elsewhere = self._offloaded.host_bytes
        how_much = described, self._taken, config, c, directory, *of_place
        check_room_for_weights(*how_much, are_mapped=isinstance(self._kept, Keeping), elsewhere=elsewhere)
        sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in description.taken.items()}
        with progress.stage("loading weights", sizes, is_long=False, in_bytes=True) as stage:
            if config.load_format == "dummy":
                weights = loader.dummy_weights(c, self.dtype, self.device, config.seed, self._taken, stage.advance)
            else:
                others = "" if self._draft is None else prefix_of(self._draft.model_config)
                if isinstance(self._kept, Keeping):
                    size, what = num_bytes(description.weights), (self._kept, config, self.model_config, directory)
                    map_weights(*what, self.dtype, size, stage.advance, others)
                how = self.dtype, self.device, self._taken, stage.advance
                weights = loader.load_weights(directory, c, *how, others)
            weights = own_weights(weights, c)
            if self._offloaded is not None:
                weights = self._offloaded.over_buffers(weights, self.device)
        if isinstance(adaptable, Adaptable):
            adaptable.note_names(description.other_names)
        say_cost_of_rounding(progress, self.linears, config.quantization)
        for tensor in tensors(weights):
            mark_static_address(tensor)
        release_freed_memory()  # what was read and converted on the way
        self.start_times.weights = time.perf_counter() - started
        self.adapter_bytes = change_bytes(weights)
        shared = 0 if self.shard is None else num_bytes(self.group)  # which layers hold
        self.weight_bytes = num_bytes(weights) - self.adapter_bytes - shared
        if self._offloaded is not None:
            self.weight_bytes -= self._offloaded.buffer_bytes
        if isinstance(self._kept, Keeping) and isinstance(mapped := self._kept.file, KeptWeights):
            self.read_ahead = ReadAhead(mapped, memory.share_with_mapped(mapped.nbytes))
            self.times.disk_bytes_per_second = self.read_ahead.disk_bytes_per_second
        return weights

    def _load_network(
        self, config: EngineConfig, draft: DraftPlan, progress: StartProgress, weights: Any
    ) -> DraftNetwork:
        return draft.load(progress, weights, self._sharing, self._last_layer(config, weights))

    def _last_layer(self, config: EngineConfig, weights: Any) -> LastLayer | None:
        """The model's last layer, if a drafter may compute it when it reads a prompt; None: steps compute all of it.

        Other processes, to which blocks go, might keep something else of a token.
        """
        is_alone = self.num_ranks == 1 and self.shard is None and not config.transfers
        is_plain = self.adapters is None and self._offloaded is None and self.read_ahead is None
        if not (is_alone and is_plain):
            return None
        return last_layer(self._own_config, weights, [size.window for size in self.pool_sizes.windows])

    def _make_swap_space(self, config: EngineConfig, rows: int | None) -> SwapSpace:
        sizes, limits = self.pool_sizes, self.limits
        swapped = sizes.swapped_within(config.swap_space_bytes, limits.blocks_per_request)
        swapped = least(swapped[0], self.peers), least(swapped[1], self.peers)  # stages have layers of other sizes
        groups, counts = self.steps.cache_groups(), (*swapped, *sizes.kept_within(config.kv_host_bytes))
        if rows is None:
            return SwapSpace(groups, *counts)
        assert self.shard is not None
        windows = short_windows(self.model_config, limits.max_model_len)
        of_model = self.model_config, self.cache_dtypes, windows, limits.block_size
        return SharedSwapSpace(groups, counts, *of_model, self.shard, rows)

    def _allocate(self, num_blocks: int, num_slots: int) -> KVCache:
        """A KV cache of so many blocks and slots, and the sinks."""
        sizes, size = self.pool_sizes, self.limits.block_size
        places = {window: count + 1 for window, count in sizes.places(num_blocks).items()}
        return allocate(self._own_config, self.cache_dtypes, num_blocks + 1, size, self.device, places, num_slots + 1)

    def _allocate_for_drafter(self, num_blocks: int) -> KVCache:
        """The same for a network that drafts; nothing if there is none."""
        if self._draft is None:
            return ()
        return self._draft.allocate(num_blocks + 1, self.limits.block_size)

    def _compile(self, config: EngineConfig, builds: Builds | None, progress: StartProgress) -> None:
        """``builds``: as ``start_builds`` gives them."""
        started, enforce_eager = time.perf_counter(), config.enforce_eager
        kernels = None if builds is None else builds.kernels
        if kernels is not None and native.compiler() is None and not enforce_eager:
            enforce_eager = True  # Inductor needs a compiler for a CPU
            native.warn_of_missing_compiler("steps run uncompiled, those of the bundled model by 6 to 20% longer")
        progress.advise(
            f"graphs that are missing are made now and kept in {native.cache_directory()}: the next start with the "
            "same arguments takes seconds. compiled-llm compile makes them ahead"
        )
        self._turn.begin()
        self.steps.compile(
            self.cache_dtypes,
            enforce_eager=enforce_eager,
            num_workers=self._turn.num_workers(config.compile_workers),
            progress=progress,
            processes=None if builds is None else builds.processes,
            before_first_step=functools.partial(self._before_first_step, kernels),
        )
        times = self.start_times
        times.kernels = 0.0 if kernels is None else kernels.seconds_waited
        times.build = self.steps.build_seconds
        times.load = time.perf_counter() - started - times.kernels - times.build

    def _before_first_step(self, kernels: KernelBuild | None) -> None:
        """Everything that other processes can compile is compiled."""
        if kernels is not None:
            kernels.finish()
        self._turn.end()

    def _record_on(self, num_blocks: int) -> None:
        """Exchange the KV pool; on a GPU, what the graphs and the pool before held is free before the new one comes."""
        self.steps.hold(self._allocate(0, 0), self._allocate_for_drafter(0))
        self.steps.drop_graphs()
        kv_cache = self._allocate(num_blocks, self.limits.num_state_slots)
        self.steps.record_again(kv_cache, self._allocate_for_drafter(num_blocks))

    def _make_pool(self, config: EngineConfig, memory: StartMemory, progress: StartProgress) -> WorkerFacts:
        """Give the KV pool the memory that compiling and the largest steps have left. Measures what it does."""
        release_freed_memory()  # of compiling, or of reading what was compiled
        with progress.stage("warming up", {"the largest steps": 1.0}, is_long=False):
            self.swap_space.rehearse(self.steps.cache_groups())
            # While it runs, mapped weights come into memory, which cannot be told from activations.
            measures = not self.steps.serves_before and self.read_ahead is None
            run_largest = self.steps.run_largest if measures else None
            least(0, self.peers)  # all have loaded what they will, and none has a pool yet
            unwritten = self.steps.unwritten_bytes
            if measures:  # else it would count as what the largest steps take
                self.steps.hidden.zero_()
                unwritten = self.steps.sampling.unwritten_bytes
            of_steps = {"unwritten": unwritten, "beside": self.steps.bytes_behind_largest}
            memory.after_compiling(run_largest, keeps_graphs=self.steps.uses_trees, **of_steps)
            self._record_on(asked := least(memory.num_blocks(), self.peers))
            if (num_blocks := least(memory.blocks_after_recording(asked), self.peers)) < asked:
                self._record_on(num_blocks)
            self.swap_space.rehearse(self.steps.cache_groups())
        of_drafter = None
        if isinstance(drafting := self.steps.drafting, NetworkStage):
            of_drafter = drafting.network.nbytes, num_bytes(drafting.kv_cache)
            drafting.make_coverage(num_blocks, self.swap_space.num_blocks + self.swap_space.num_tier_blocks)
        mapped = 0 if self.read_ahead is None else self.read_ahead.weights.nbytes
        offload = self._offloaded
        self.memory_ledger = memory.ledger(
            max(0, self.weight_bytes - mapped - (0 if offload is None else offload.host_bytes)),
            self.steps.nbytes + self._host_group.memory.nbytes // self.num_ranks * (self.device.type == "cpu"),
            self.kv_cache_bytes,
            self.swap_space.nbytes - self.swap_space.tier_nbytes,
            of_drafter,
            self.adapter_bytes,
            self.swap_space.tier_nbytes,
            None if offload is None else (offload.memory.nbytes, offload.buffer_bytes),
        )
        contents = tuple(map(str, (self.model_config, self.dtype, self.cache_dtypes, config.model, config.seed)))

        def agreed(seconds: float) -> float:
            return least(int(seconds * 1e9), self._host_group) / 1e9

        known: tuple[bytes, ...] | None = None
        if config.has_files and self.num_ranks == 1:  # else those of all ranks are the engine's
            self.files = self._open_files(config)
            contents, known = (self.files.folder.key.hex(),), tuple(self.files.folder.known)
        try:
            sizes = num_blocks, self.swap_space, contents
            measure = functools.partial(worker_facts, config, self.steps, *sizes, progress, agreed)
            found = in_turns(measure, self._host_group, self.peers)
        except BaseException:
            if self.files is not None:
                self.files.close()  # its threads would outlive a start that failed
            raise
        release_freed_memory()  # of steps that were larger than those that come
        if self.device.type == "cpu":
            *with_blocks, _ = self.steps.cache_groups()
            self.pool_pages = PoolPages([tensor for group in with_blocks for tensor in group])
        return dataclasses.replace(found, blocks_on_disk=known)

    def _open_files(self, config: EngineConfig) -> FileThread:
        """Those of a process by itself, which may keep something else of a token than others: see ``_last_layer``."""
        drafting = self.steps.drafting
        own = drafting.network.last_layer if isinstance(drafting, NetworkStage) else None
        of_model = self.model_config, self.dtype, self.exact, self._directory, self._drafter
        of_blocks = self.swap_space.layout, self.swap_space.pools
        return open_files(config, *of_model, self.device, *of_blocks, None if own is None else own.number)
