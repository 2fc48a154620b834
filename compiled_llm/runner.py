"""ModelRunner: owns weights, KV cache and compiled steps. Everything that runs on the device starts here."""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from compiled_llm import loader
from compiled_llm.batch import Bucket, RequestRows, StepBuffers, buckets_of, choose_bucket
from compiled_llm.compiler import CompiledFunction, CompileReport, use_own_cache_directory
from compiled_llm.config import EngineConfig, Limits
from compiled_llm.kv_cache import allocate, bytes_per_token, layer_dtypes
from compiled_llm.models import family
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.weights import keep, pack, tensors
from compiled_llm.ops import kv_quant, native
from compiled_llm.sampler import SamplingInput, sample, sample_greedy
from compiled_llm.scheduler import SchedulerOutput

_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
_GPU_WORKSPACE_BYTES = 2 * 2**30  # left free for CUDA graphs and kernels' workspaces


@dataclasses.dataclass
class RunnerTimes:
    """Host seconds since the engine was made, and rows of buckets that held no token."""

    prepare_seconds: float = 0.0
    execute_seconds: float = 0.0
    num_padding_tokens: int = 0


class ModelRunner:
    """Runs steps. After construction every bucket is compiled, and the KV pool has ``num_blocks`` blocks."""

    @torch.inference_mode(False)  # tensors made under inference mode could not be written outside of it
    def __init__(self, config: EngineConfig, model_config: ModelConfig, directory: Path) -> None:
        self.device = resolve_device(config.device)
        self.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        self.cache_dtypes = layer_dtypes(config, self.dtype, model_config.num_layers)
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            for dtype in self.cache_dtypes:
                kv_quant.check_capability(dtype, capability)
        self.model_config = model_config
        self.limits = Limits.resolve(
            config, model_config.max_position_embeddings, _DEFAULT_BATCHED_TOKENS[self.device.type]
        )
        enforce_eager = config.enforce_eager
        use_own_cache_directory()
        if self.device.type == "cpu":
            # Without a compiler both are None and a warning said so; Inductor cannot compile for a CPU either.
            native.load("attention_cpu")
            native.load("linear_cpu")
            enforce_eager = enforce_eager or native.compiler() is None

        self.weights = self._load(config, directory)
        self.weight_bytes = sum(t.numel() * t.element_size() for t in tensors(self.weights))
        self.num_blocks = self._num_blocks(config)
        self.kv_cache = self._allocate(self.num_blocks + 1)  # and the sink
        self.rows = RequestRows(self.limits, model_config.vocab_size)
        self.buckets = buckets_of(self.limits)
        self.buffers = {bucket: StepBuffers(bucket, self.limits, self.device) for bucket in self.buckets}
        self.times = RunnerTimes()
        self._steps: dict[Bucket, CompiledFunction] = {}
        self._samplers: dict[int, CompiledFunction] = {}
        self._compile(enforce_eager)

    def execute(self, output: SchedulerOutput) -> list[int]:
        """Run a step; returns the token sampled for each of ``output.requests`` (meaningless where none was due)."""
        started = time.perf_counter()
        bucket = choose_bucket(self.buckets, output)
        buffers = self.buffers[bucket]
        rows = self.rows.update(output)
        buffers.fill(output.requests, rows, self.rows)
        prepared = time.perf_counter()

        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        token_ids, logits = self._run(bucket)
        if self.rows.temperature[rows].any():
            token_ids = self._samplers[bucket.num_requests](logits, buffers.sampling_input)
        sampled = token_ids.tolist()[: len(rows)]
        self.times.prepare_seconds += prepared - started
        self.times.execute_seconds += time.perf_counter() - prepared
        self.times.num_padding_tokens += bucket.num_tokens - output.num_tokens
        return sampled

    def close(self) -> None:
        """Free weights, KV cache and graphs."""
        self._steps.clear()
        self._samplers.clear()
        self.buffers.clear()
        del self.weights, self.kv_cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def compile_report(self) -> CompileReport:
        functions = [*self._steps.values(), *self._samplers.values()]
        return CompileReport(tuple(function.report() for function in functions))

    @property
    def kv_cache_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in tensors(self.kv_cache))

    def _free_bytes(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.mem_get_info(self.device)[0] if on_gpu else psutil.virtual_memory().available

    def _load(self, config: EngineConfig, directory: Path) -> Any:
        c = self.model_config
        packs = self.device.type == "cpu" and self.dtype == torch.bfloat16 and native.load("linear_cpu") is not None
        # A packed head is a copy of its own where the checkpoint ties it to the embedding.
        parameters = loader.num_parameters(c) + (c.vocab_size * c.hidden_size if packs and c.tie_word_embeddings else 0)
        needed, free = parameters * self.dtype.itemsize, self._free_bytes()
        if needed > free:
            raise ValueError(
                f"the weights need {needed >> 20} MiB in {str(self.dtype)[6:]}, and {free >> 20} are free on "
                f"{self.device}: choose a smaller model, a shorter dtype or another device"
            )
        convert = pack if packs else keep
        if config.load_format == "dummy":
            weights = loader.dummy_weights(c, self.dtype, self.device, config.seed, convert)
        else:
            weights = loader.load_weights(directory, c, self.dtype, self.device, convert)
        for tensor in tensors(weights):
            torch._dynamo.mark_static_address(tensor)
        return weights

    def _num_blocks(self, config: EngineConfig) -> int:
        """Blocks of the KV pool, the sink left out; the first size that is given wins."""
        block_bytes = bytes_per_token(self.model_config, self.cache_dtypes) * self.limits.block_size
        most = min(self._free_bytes() // block_bytes, 2**31 // self.limits.block_size) - 1  # slots are int32
        if config.num_kv_blocks is not None:
            if config.num_kv_blocks > most:
                raise ValueError(
                    f"num_kv_blocks must be at most {most} (the memory free), given {config.num_kv_blocks}"
                )
            return config.num_kv_blocks
        if config.kv_cache_memory_bytes is not None:
            blocks = config.kv_cache_memory_bytes // block_bytes
            if not 1 <= blocks <= most:
                raise ValueError(
                    f"kv_cache_memory_bytes must be from {block_bytes} (one block) to {most * block_bytes} (the memory "
                    f"free), given {config.kv_cache_memory_bytes}"
                )
            return blocks
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            room = (
                self._free_bytes()
                - (1 - config.gpu_memory_utilization) * total
                - self._activation_bytes()
                - _GPU_WORKSPACE_BYTES
            )
        else:
            room = self._free_bytes() * 0.5 * config.gpu_memory_utilization
        useful = self.limits.max_num_seqs * self.limits.blocks_per_request
        blocks = max(0, min(int(room) // block_bytes, useful, most))
        if blocks < self.limits.blocks_per_request:
            fits = blocks * self.limits.block_size
            raise ValueError(
                f"{max(0, int(room)) >> 20} MiB are free for the KV pool, and a request of max_model_len="
                f"{self.limits.max_model_len} tokens needs {self.limits.blocks_per_request * block_bytes >> 20}. "
                + (f"Lower max_model_len to {fits} or less" if fits else "Free some memory")
            )
        return blocks

    def _activation_bytes(self) -> int:
        """A bound on what the largest step holds besides weights and cache: logits, and the widest layer's tensors."""
        c, tokens = self.model_config, self.limits.token_bucket_sizes[-1]
        per_token = 4 * c.hidden_size + 3 * c.intermediate_size + 2 * c.qkv_features
        logits = self.limits.decode_bucket_sizes[-1] * c.vocab_size * 16
        return tokens * per_token * self.dtype.itemsize + logits * len(self.limits.decode_bucket_sizes)

    def _allocate(self, num_blocks: int) -> KVCache:
        kv_cache = allocate(self.model_config, self.cache_dtypes, num_blocks, self.limits.block_size, self.device)
        for tensor in tensors(kv_cache):
            torch._dynamo.mark_static_address(tensor)
        return kv_cache

    def _compile(self, enforce_eager: bool) -> None:
        """Compile and warm up every bucket, and a sampler for each number of rows, on steps that are all padding."""
        buckets = tqdm(self.buckets, desc="compiling", unit="bucket", disable=None, leave=False)
        for bucket in buckets:
            buckets.set_postfix_str(bucket.name)
            step = step_function(self.model_config, bucket.max_query_len)
            self._steps[bucket] = CompiledFunction(step, bucket.name, self.device, enforce_eager)
            self._steps[bucket].warm_up(functools.partial(self._step_arguments, bucket))
            sampler_arguments = functools.partial(self._sampler_arguments, bucket)
            if bucket.num_requests in self._samplers:
                self._samplers[bucket.num_requests].record_after(sampler_arguments)
                continue
            sampler = CompiledFunction(sample, f"sample_{bucket.num_requests}", self.device, enforce_eager)
            sampler.warm_up(sampler_arguments)
            self._samplers[bucket.num_requests] = sampler

    def _step_arguments(self, bucket: Bucket) -> tuple[Any, StepInput, KVCache]:
        return self.weights, self.buffers[bucket].step_input, self.kv_cache

    def _sampler_arguments(self, bucket: Bucket) -> tuple[Tensor, SamplingInput]:
        return self._run(bucket)[1], self.buffers[bucket].sampling_input

    def _run(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        return self._steps[bucket](*self._step_arguments(bucket))


def step_function(model_config: ModelConfig, max_query_len: int) -> Any:
    """The step of one bucket: a pure function (weights, step input, KV cache) -> (greedy tokens [R], logits [R, V])."""
    forward = family(model_config.architecture).forward

    def step(weights: Any, step_input: StepInput, kv_cache: KVCache) -> tuple[Tensor, Tensor]:
        logits = forward(weights, step_input, kv_cache, model_config, max_query_len)
        return sample_greedy(logits), logits

    return step


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
