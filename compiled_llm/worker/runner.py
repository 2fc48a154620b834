"""ModelRunner: owns weights, KV cache and compiled steps. Everything that runs on the device starts here."""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.compiling.cache import CompileCache, engine_cache
from compiled_llm.compiling.compiler import check_torch
from compiled_llm.compiling.cuda_graphs import graph_pool
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.compiling.libraries import use_own_cache_directory
from compiled_llm.compiling.messages import Job
from compiled_llm.compiling.parallel import build_missing, expected_seconds
from compiled_llm.compiling.report import CompileReport
from compiled_llm.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.linears.kinds import linear_kind
from compiled_llm.models.registry import family
from compiled_llm.models.weights import linears, tensors
from compiled_llm.ops import native, swap
from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.torch_private import keeps_compiled_code, mark_static_address
from compiled_llm.progress import Stage, StartProgress
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.step_result import LogprobColumns, StepResult
from compiled_llm.step.kv_cache import allocate, bytes_per_token, layer_dtypes, num_tensors
from compiled_llm.step.logits_transforms import load_transforms
from compiled_llm.step.logprobs import LogprobRows
from compiled_llm.step.step import Feedback, step_function
from compiled_llm.worker import loader
from compiled_llm.worker.calibration import measure_costs, swap_indices
from compiled_llm.worker.cpu_kernels import load_kernels
from compiled_llm.worker.memory import TRIAL_BLOCKS, StartMemory, estimated_activations, free_bytes
from compiled_llm.worker.profiler import StepProfiler
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sampling_stage import Samplers, Wanted
from compiled_llm.worker.step_buffers import StepBuffers

_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
_SECONDS_A_CALL = 0.1  # of a compiled function that is on disk: loading it, and calling it once
_SECONDS_A_SAMPLER = 5.0  # about, to compile one
_SWAP_REHEARSAL_BYTES = 128 << 20  # more than swapping on a GPU stages at once


@dataclasses.dataclass
class RunnerTimes:
    """Seconds since the engine was made, and rows of buckets that held no token.

    Attributes:
        prepare_seconds: filling buffers.
        launch_seconds: handing steps to the device; 0 on a CPU, which is the device.
        execute_seconds: launching, and waiting for the tokens; profiling not counted.
    """

    prepare_seconds: float = 0.0
    launch_seconds: float = 0.0
    execute_seconds: float = 0.0
    num_padding_tokens: int = 0


@dataclasses.dataclass
class StartTimes:
    """Seconds that the parts of a start took.

    Attributes:
        kernels: loading the C++ kernels, building them where they are not on disk.
        weights: reading or making the weights, and packing them.
        compile: taking compiled functions from disk or compiling them, and calling each once.
    """

    kernels: float = 0.0
    weights: float = 0.0
    compile: float = 0.0


@dataclasses.dataclass
class LaunchedStep:
    """A step that the device works on.

    Attributes:
        tokens: [R] on the host, there once ``done`` is.
        logprobs: of these tokens, likewise; None where no request wants them.
        prompt_logprobs: of the step's ``prompt_targets``, on the host.
        seconds: what the device took, once the step is collected.
    """

    bucket: Bucket
    num_requests: int
    tokens: Tensor
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    seconds: float = 0.0
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None


class ModelRunner:
    """Runs steps. After construction every bucket is compiled, and the KV pool has ``num_blocks`` blocks."""

    @torch.inference_mode(False)  # tensors made under inference mode could not be written outside of it
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, directory: Path, progress: StartProgress
    ) -> None:
        self.device = resolve_device(config.device)
        check_torch(self.device, config.enforce_eager)
        self._graph_pool = graph_pool(config.cuda_graphs, self.device)
        self.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        self.cache_dtypes = layer_dtypes(config, self.dtype, model_config.num_layers)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # streams and events are those of the current device
            capability = torch.cuda.get_device_capability(self.device)
            for dtype in self.cache_dtypes:
                kv_quant.check_capability(dtype, capability)
        self.model_config = model_config
        self.limits = EngineLimits.resolve(
            config, model_config.max_position_embeddings, _DEFAULT_BATCHED_TOKENS[self.device.type]
        )
        enforce_eager = config.enforce_eager
        use_own_cache_directory()
        self.start_times = StartTimes()
        started = time.perf_counter()
        if self.device.type == "cpu":
            load_kernels(self.dtype, progress)
            # Without a compiler none was loaded and a warning said so; Inductor cannot compile for a CPU either.
            enforce_eager = enforce_eager or native.compiler() is None
        self.start_times.kernels = time.perf_counter() - started
        self.linears = linear_kind(self.device, self.dtype)

        self._block_bytes = bytes_per_token(model_config, self.cache_dtypes) * self.limits.block_size
        memory = StartMemory(
            config,
            self.limits,
            self.device,
            self._block_bytes,
            num_tensors(model_config, self.cache_dtypes),
            estimated_activations(model_config, self.limits, self.dtype.itemsize),
        )
        started = time.perf_counter()
        self.weights = self._load(config, directory, progress)
        self.start_times.weights = time.perf_counter() - started
        self.weight_bytes = _num_bytes(self.weights)
        memory.check()
        self.kv_cache = self._allocate(TRIAL_BLOCKS)
        self.swap_space = swap.host_pool(tensors(self.kv_cache), config.swap_space_bytes // self._block_bytes)
        self.buckets = buckets_of(self.limits)
        self.buffers = {bucket: StepBuffers(bucket, self.limits, self.device) for bucket in self.buckets}
        rows = self.limits.decode_bucket_sizes[-1]
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        shape = self.limits.token_bucket_sizes[-1], model_config.hidden_size
        self._hidden = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for tensor in (self.last_tokens, self._hidden):
            mark_static_address(tensor)
        self.transforms = load_transforms(config.logits_transforms, model_config.vocab_size, self.device)
        self.rows = RequestRows(self.limits, model_config.vocab_size, self.transforms)
        self.samplers = Samplers(
            model_config,
            self.limits,
            self.device,
            last_tokens=self.last_tokens,
            hidden=self._hidden,
            transforms=self.transforms,
            max_logprobs=config.max_logprobs,
            uses_trees=self.device.type == "cuda" and self._graph_pool is None and not config.enforce_eager,
        )
        on_gpu = self.device.type == "cuda"
        self._host_tokens = [torch.zeros(rows, dtype=torch.int64, pin_memory=True) for _ in range(2 if on_gpu else 0)]
        self.times = RunnerTimes()
        self.costs = StepCosts()
        self.profiler: StepProfiler | None = None  # set from outside, for a report
        self._steps: dict[Bucket, CompiledFunction] = {}
        self._last_report: CompileReport | None = None  # once closed
        memory.before_compiling()
        started = time.perf_counter()
        self._compile(config, enforce_eager, progress)
        self.start_times.compile = time.perf_counter() - started
        with progress.stage("warming up", {"the largest steps": 1.0}, is_long=False):
            self._rehearse_swap()
            memory.after_compiling(self._run_largest)
            self.num_blocks = memory.num_blocks()
            self.kv_cache = self._allocate(self.num_blocks + 1)  # and the sink
            self._record_again()
        self.memory_ledger = memory.ledger(
            self.weight_bytes, self._buffer_bytes(), self.kv_cache_bytes, self.swap_space_bytes
        )
        if config.target_itl_ms is not None or (self.num_swap_blocks and config.preemption_mode == "auto"):
            measure_costs(self, progress)
            fastest = min(self.costs.bucket_seconds.values()) * 1e3
            if config.target_itl_ms is not None and fastest > config.target_itl_ms:
                warnings.warn(
                    f"target_itl_ms={config.target_itl_ms} cannot be met beside a prompt: the fastest of "
                    f"token_bucket_sizes takes {fastest:.1f} ms. Prompts run in that one; a smaller bucket would help",
                    stacklevel=4,
                )

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Hand a step to the device. On a CPU it is done when this returns; on a GPU, ``collect`` waits for it.

        One step may be launched while another is uncollected; its inputs may be tokens that the other samples.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            return self._launch(output)

    def _launch(self, output: SchedulerOutput) -> LaunchedStep:
        started = time.perf_counter()
        bucket = choose_bucket(self.buckets, output)
        rows = self.rows.update(output)
        self.buffers[bucket].fill(output, rows, self.rows)
        self.samplers.admit(output.admissions, self.rows)
        wanted = Wanted.of(rows, output.num_samples, self.rows)
        if wanted.changes:
            self.samplers.fill(rows, output, self.rows, bucket.num_requests)
        prepared = time.perf_counter()
        self._move_blocks(output)
        swapped = time.perf_counter()
        begun, done = self._event(), self._event()
        profiler = self.profiler if self.profiler is not None and self.profiler.is_due(bucket.name) else None
        before = None if profiler is None else self.last_tokens.clone()
        logprobs = self._run(bucket, wanted)
        prompt_logprobs = self.samplers.prompt_logprobs(self.weights, output) if output.prompt_targets else None
        if done is None:
            tokens = self.last_tokens[: len(rows)].clone()
        else:
            tokens = self._host_tokens[0]
            self._host_tokens.reverse()
            tokens.copy_(self.last_tokens, non_blocking=True)
            if logprobs is not None:
                logprobs = LogprobRows(*(tensor.to("cpu", non_blocking=True) for tensor in logprobs))
            done.record()
        finished = time.perf_counter()
        self.times.prepare_seconds += prepared - started
        self.times.execute_seconds += finished - prepared
        self.times.num_padding_tokens += bucket.num_tokens - output.num_tokens
        if done is not None:
            self.times.launch_seconds += finished - prepared
        if profiler is not None and before is not None:
            self._profile(profiler, bucket, wanted, before)
        return LaunchedStep(bucket, len(rows), tokens, logprobs, prompt_logprobs, finished - swapped, begun, done)

    def _profile(self, profiler: StepProfiler, bucket: Bucket, wanted: Wanted, before: Tensor) -> None:
        """Run the step that just ran once more, from the tokens ``before`` it, for the profiler."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the step itself is no part of what the profile takes
        begun, after = time.monotonic(), self.last_tokens.clone()
        self.last_tokens.copy_(before)
        run = functools.partial(self.samplers.run, bucket, self.buffers[bucket].sampling_input, wanted=wanted)
        # Once more would be once too often for the counts of tokens that penalties are made of.
        sampler = run if any(wanted) and not wanted.changes else None
        profiler.profile(bucket.name, functools.partial(self.run_step, bucket), sampler, begun)
        self.last_tokens.copy_(after)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a step, and return its results."""
        if step.begun is not None and step.done is not None:
            started = time.perf_counter()
            step.done.synchronize()
            self.times.execute_seconds += time.perf_counter() - started
            step.seconds = step.begun.elapsed_time(step.done) / 1e3
        return StepResult(
            step.bucket,
            tuple(step.tokens[: step.num_requests].tolist()),
            None if step.logprobs is None else _columns(step.logprobs),
            None if step.prompt_logprobs is None else _columns(step.prompt_logprobs),
            step.seconds,
        )

    def close(self) -> None:
        """Free weights, KV cache and graphs; ``compile_report`` stays as it is then."""
        self._last_report = self.compile_report()
        self._steps.clear()
        self.buffers.clear()
        del self.samplers, self.weights, self.kv_cache, self.swap_space
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def compile_report(self) -> CompileReport:
        if self._last_report is not None:
            return self._last_report
        functions = [*self._steps.values(), *self.samplers.functions()]
        return CompileReport(tuple(function.report() for function in functions))

    def describe_start(self) -> str:
        """What the start did and how long that took, in a line."""
        times, report = self.start_times, self.compile_report()
        made, found = report.cache_count("miss") + report.cache_count("off"), report.cache_count("hit")
        graphs = [f"{made} graphs compiled" if made else "", f"{found} graphs from disk" if found else ""]
        compiled = " and ".join(filter(None, graphs)) or "nothing compiled (eager)"
        return f"weights {times.weights:.1f} s, C++ kernels {times.kernels:.1f} s, {compiled} in {times.compile:.1f} s"

    def compiled_files(self) -> list[Path]:
        """The files that hold this engine's compiled functions. ``ValueError`` on a GPU, where torch keeps them."""
        if self._cache is None:
            raise ValueError(f"compiled functions are kept on a CPU only, given device={str(self.device)!r}")
        return self._cache.used

    @property
    def kv_cache_bytes(self) -> int:
        return _num_bytes(self.kv_cache)

    def _load(self, config: EngineConfig, directory: Path, progress: StartProgress) -> Any:
        # No position beyond max_model_len is ever asked for.
        c = dataclasses.replace(self.model_config, max_position_embeddings=self.limits.max_model_len)
        description, described = family(c.architecture).describe(c, self.dtype, self.linears)
        largest = max(linear.nbytes for linear in linears(described))
        rope_bytes = _num_bytes(described.ropes)
        needed = _num_bytes(described) + self.linears.bytes_while_taking(largest)
        free = free_bytes(self.device)
        if needed > free:
            raise ValueError(
                f"{directory / 'config.json'}: the weights need {needed >> 20} MiB in {str(self.dtype)[6:]}, "
                f"{rope_bytes >> 20} of them for max_model_len={c.max_position_embeddings}, and {free >> 20} are free "
                f"on {self.device}: choose a smaller model, a shorter dtype, a smaller max_model_len or another device"
            )
        sizes = {name: torch.Size(shape).numel() for name, shape in description.shapes.items()}
        with progress.stage("loading weights", sizes, is_long=False) as stage:
            if config.load_format == "dummy":
                weights = loader.dummy_weights(c, self.dtype, self.device, config.seed, self.linears, stage.finish)
            else:
                weights = loader.load_weights(directory, c, self.dtype, self.device, self.linears, stage.finish)
        for tensor in tensors(weights):
            mark_static_address(tensor)
        return weights

    def _allocate(self, num_blocks: int) -> KVCache:
        return allocate(self.model_config, self.cache_dtypes, num_blocks, self.limits.block_size, self.device)

    def _buffer_bytes(self) -> int:
        """Of all buckets' inputs on the device: each bucket has one piece of memory, which all its fields share."""
        pieces = [buffers.nbytes for buffers in self.buffers.values()]
        return sum(pieces) + self.samplers.nbytes + self.last_tokens.nbytes + self._hidden.nbytes

    @property
    def num_swap_blocks(self) -> int:
        return self.swap_space.shape[0]

    @property
    def swap_space_bytes(self) -> int:
        return self.swap_space.numel()

    def _compile(self, config: EngineConfig, enforce_eager: bool, progress: StartProgress) -> None:
        """Compile and warm up every bucket, and what runs behind it, on steps that are all padding."""
        keeps = self.device.type == "cpu" and not enforce_eager and keeps_compiled_code()
        cache = engine_cache(self.model_config, self.limits, self.dtype, self.cache_dtypes) if keeps else None
        self._cache = cache
        jobs = [] if enforce_eager else self._jobs()
        seconds = {job.name: expected_seconds(job) for job in jobs}  # of what is to be compiled here
        if cache is not None:
            seconds = build_missing(cache, jobs, config.compile_workers, progress)
        if not enforce_eager:
            seconds |= dict.fromkeys(self.samplers.uncached(), _SECONDS_A_SAMPLER)
        title = "compiling graphs" if seconds else "loading compiled graphs"
        weights = {job.name: _SECONDS_A_CALL for job in jobs} | seconds
        with progress.stage(title, weights, seconds=sum(seconds.values()) or None, is_long=bool(seconds)) as stage:
            self._warm_up(enforce_eager, cache, stage)

    def _warm_up(self, enforce_eager: bool, cache: CompileCache | None, stage: Stage) -> None:
        def make(function: Callable, name: str, keep: bool = True) -> CompiledFunction:
            stage.next(name)
            return CompiledFunction(
                function, name, self.device, enforce_eager, graph_pool=self._graph_pool, cache=cache if keep else None
            )

        for bucket in self._recording_order():
            self._steps[bucket] = make(step_function(self.model_config, bucket.max_query_len), bucket.name)
            self._steps[bucket].warm_up(functools.partial(self._step_arguments, bucket))
            logits = functools.partial(self.run_step, bucket)
            self.samplers.warm_up(bucket, self.buffers[bucket].sampling_input, logits, make)
        self.samplers.warm_up_prompts(self.weights, make)

    def _jobs(self) -> list[Job]:
        """Everything to compile, as other processes can do it. Logits are described, since no step has run yet."""
        threads, vocab_size = torch.get_num_threads(), self.model_config.vocab_size
        jobs = []
        for bucket in self.buckets:
            recipe = functools.partial(step_function, self.model_config, bucket.max_query_len)
            jobs.append(Job(bucket.name, recipe, self._step_arguments(bucket), threads))
        inputs = {bucket.num_requests: self.buffers[bucket].sampling_input for bucket in self.buckets}
        logits = functools.partial(torch.empty, dtype=self.dtype)
        return jobs + self.samplers.jobs(inputs, lambda rows: logits(rows, vocab_size), self.weights)

    def _record_again(self) -> None:
        """On a GPU: record every CUDA graph on the KV cache as it is now. Nothing is compiled."""
        for bucket in self._recording_order():
            self._steps[bucket].record_again(functools.partial(self._step_arguments, bucket))
            logits = functools.partial(self.run_step, bucket)
            self.samplers.record_again(bucket, self.buffers[bucket].sampling_input, logits)

    def _recording_order(self) -> list[Bucket]:
        """Graphs that share memory begin with the largest, so that the others fit into what it took."""
        return self.buckets if self._graph_pool is None else self.buckets[::-1]

    def _run_largest(self) -> None:
        """Run the largest bucket of each kind, all padding: what a step allocates depends on its bucket alone."""
        for bucket in {bucket.kind: bucket for bucket in self.buckets}.values():
            self._run(bucket, Wanted(samples=True, changes=True, logprobs=True))

    def _rehearse_swap(self) -> None:
        """On a GPU: swap out as much as is staged at once, so that torch's allocator holds that from now on."""
        count = min(self.num_swap_blocks, -(-_SWAP_REHEARSAL_BYTES // self._block_bytes))
        if self.device.type == "cuda" and count:
            swap.swap_out(tensors(self.kv_cache), self.swap_space, *swap_indices([(1, n + 1) for n in range(count)]))

    def _step_arguments(self, bucket: Bucket) -> tuple[Any, StepInput, KVCache, Feedback]:
        buffers = self.buffers[bucket]
        feedback = Feedback(buffers.feedback, self.last_tokens, self._hidden)
        return self.weights, buffers.step_input, self.kv_cache, feedback

    def run_step(self, bucket: Bucket) -> Tensor:
        return self._steps[bucket](*self._step_arguments(bucket))

    def _run(self, bucket: Bucket, wanted: Wanted) -> LogprobRows | None:
        """Run the step that stands in the bucket's buffers; its tokens are in ``last_tokens`` then."""
        if self.device.type == "cuda" and self._graph_pool is None:
            torch.compiler.cudagraph_mark_step_begin()
        return self.samplers.run(bucket, self.buffers[bucket].sampling_input, self.run_step(bucket), wanted)

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Swap and copy as the scheduler decided since the step before; on a GPU, in the order of its stream."""
        if not output.swapped_out and not output.swapped_in and not output.copies:
            return
        caches = tensors(self.kv_cache)
        for pairs, copy in ((output.swapped_out, swap.swap_out), (output.swapped_in, swap.swap_in)):
            if pairs:
                copy(caches, self.swap_space, *swap_indices(pairs))
        if output.copies:
            sources, targets = torch.tensor(output.copies, dtype=torch.int64).unbind(1)
            swap.copy_blocks(caches, sources, targets)


def _columns(rows: LogprobRows) -> LogprobColumns:
    logprobs, ranks, top_logprobs, top_ids = (column.tolist() for column in rows)
    return LogprobColumns(tuple(logprobs), tuple(ranks), tuple(map(tuple, top_logprobs)), tuple(map(tuple, top_ids)))


def _num_bytes(tree: Any) -> int:
    """Bytes of all tensors in nested tuples."""
    return sum(tensor.nbytes for tensor in tensors(tree))


def resolve_device(name: str) -> torch.device:
    """The torch device of an engine argument. ``ValueError`` when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', given {name!r}") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device={name!r} is not there: torch sees {count} CUDA devices. Allowed: 'cpu', 'auto'")
        return torch.device("cuda", device.index or 0)
    return device
