"""One bucket's step of an engine on a GPU that is not there, compiled as the engine does it, on tensors without data.

What the engine does at start and what is done here differ in the weights alone: these are the shapes that the family
describes. So a model of any size takes little memory.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.compiling.argument_specs import tensors_in
from compiled_llm.compiling.compiler import compile_at_first_call, own_copy
from compiled_llm.compiling.cuda_graphs import check_cuda_graphs, is_programmatic
from compiled_llm.compiling.gpu_properties import GpuProperties
from compiled_llm.gpu_step.gpus import Gpu
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import MixedLayers
from compiled_llm.models.linears.adapted import Adaptable, AnyAdapted, flags_on
from compiled_llm.models.linears.dense import Dense, counters_on
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.quantized import Quantized, QuantizedExperts
from compiled_llm.models.linears.sharded import Sharding
from compiled_llm.models.offload import chosen_layers, with_fetches, with_weights
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.ops import RankGroup
from compiled_llm.ops.linear.quantized_layouts import empty_quantized
from compiled_llm.ops.torch_private import mark_static_address, tell_compiler
from compiled_llm.ops.torch_private_gpu import (
    FakeTensorMode,
    Generated,
    generate,
    keep_nothing,
    pretend_gpu,
    without_constants_on_gpu,
)
from compiled_llm.scheduling.bucket import Bucket, buckets_of
from compiled_llm.step.kv_cache import allocate, layer_dtypes, short_windows
from compiled_llm.step.step import Feedback, step_function
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.device import STEP_DEFAULTS, use_device
from compiled_llm.worker.pool_sizes import with_state_slots
from compiled_llm.worker.step_buffers import StepBuffers

DEVICE = torch.device("cuda", 0)
_BLOCKS = 64  # of the KV cache; the code is for any number


class TracedStep(NamedTuple):
    """A bucket's step before it is compiled.

    Attributes:
        function: the step, a pure function of ``args``, which are fake tensors of ``mode``.
        dtype: of weights and activations.
    """

    bucket: Bucket
    config: ModelConfig
    dtype: torch.dtype
    function: Callable
    args: tuple
    mode: FakeTensorMode
    num_ranks: int = 1


class FakeStep(NamedTuple):
    """A bucket's step, generated.

    Attributes:
        dtype: of weights and activations, as "bfloat16".
        layers: each layer's attention or state, of the layers that were generated.
        mode: that of the fake tensors.
        programmatic: whether launches may start while the one before still runs.
    """

    bucket: Bucket
    config: ModelConfig
    dtype: str
    layers: MixedLayers
    generated: Generated
    mode: FakeTensorMode
    programmatic: bool


def pretend(gpu: Gpu) -> None:
    """Make this process take ``gpu`` for the one that it has, for good. Nothing can run on it, and nothing is kept."""
    pretend_gpu(properties_of(gpu))
    keep_nothing()


def properties_of(gpu: Gpu) -> GpuProperties:
    """As torch has them of such a GPU."""
    return GpuProperties(
        gpu.name, *gpu.capability, gpu.num_sms, gpu.memory_bytes, gpu.l2_bytes, gpu.registers, gpu.threads,
        gpu.sm_bytes, gpu.block_bytes,
    )  # fmt: skip


def with_bucket(engine: EngineConfig, model: ModelConfig, name: str) -> EngineConfig:
    """``engine`` on a GPU, and with the bucket ``name`` among its own."""
    match = re.fullmatch(r"(decode|tokens)_([1-9]\d*)(x[1-9]\d*)?(_lora)?", name)
    is_lora = match is not None and match[4]
    wrong_len = match is not None and match[3] and (match[1] != "decode" or int(match[3][1:]) != _most_len(engine))
    if match is None or wrong_len or (is_lora and (match[1] != "decode" or not engine.enable_lora)):
        drafted = f", or decode_<size>x{_most_len(engine)} with drafts" if _most_len(engine) > 1 else ""
        raise ValueError(f"--bucket must be decode_<size> or tokens_<size>{drafted}, given {name!r}")
    engine = dataclasses.replace(engine, device="cuda", model=None)
    limits = _limits(engine, model)
    if name in {bucket.name for bucket in buckets_of(limits)}:
        return engine
    size = int(match[2])
    if match[1] == "decode":
        return dataclasses.replace(engine, bucket_sizes=tuple(sorted({*(engine.bucket_sizes or ()), size})))
    return dataclasses.replace(engine, token_bucket_sizes=tuple(sorted({*(engine.token_bucket_sizes or ()), size})))


def _most_len(engine: EngineConfig) -> int:
    """Most tokens of a request in a decode."""
    return 1 if engine.speculation is None else 1 + engine.speculation.num_tokens


def _limits(engine: EngineConfig, model: ModelConfig) -> EngineLimits:
    limits = EngineLimits.resolve(engine, model.max_position_embeddings, STEP_DEFAULTS["cuda"])
    return limits.with_drafts(_most_len(engine) - 1, one_graph=False)


def generate_step(engine: EngineConfig, config: ModelConfig, bucket_name: str) -> FakeStep:
    """Generate a bucket's code for the GPU of ``pretend``. Arguments and errors as of ``step_on_fakes``."""
    step = step_on_fakes(engine, config, bucket_name)
    tell_compiler(tensors_in(step.args))
    compiled = compile_at_first_call(own_copy(step.function, bucket_name), cuda_graphs=engine.cuda_graphs == "trees")
    with contextlib.nullcontext() if step.num_ranks == 1 else without_constants_on_gpu():
        generated = generate(compiled, step.args, step.mode)
    if engine.cpu_offload_gb:  # torch's own graphs take no tensors of the host; those that an engine captures do
        others = tuple(reason for reason in generated.skip_reasons if "due to cpu device" not in reason)
        generated = generated._replace(skip_reasons=others)
    capability = torch.cuda.get_device_capability()
    in_order = engine.cpu_offload_gb > 0 or step.num_ranks > 1
    programmatic = is_programmatic(engine.cuda_graphs, capability, in_order=in_order)
    name = str(step.dtype).removeprefix("torch.")
    return FakeStep(step.bucket, step.config, name, layers_of(step.config), generated, step.mode, programmatic)


def step_on_fakes(engine: EngineConfig, config: ModelConfig, bucket_name: str) -> TracedStep:
    """A bucket's step for the GPU of ``pretend``, with its arguments; of the first rank, if ``engine`` has several.

    Args:
        engine: its arguments, for ``device="cuda"``.
        bucket_name: as ``Bucket.name``.

    Raises:
        ValueError: the engine has no such bucket, or would refuse an argument, also for this GPU.
    """
    dtype = getattr(torch, config.dtype if engine.dtype == "auto" else engine.dtype)
    limits = _limits(engine, config)
    limits = with_state_slots(limits, engine, config, dtype)
    buckets = {bucket.name: bucket for bucket in buckets_of(limits)}
    if bucket_name not in buckets:
        raise ValueError(f"the bucket must be one of the engine's, {', '.join(buckets)}, given {bucket_name!r}")
    bucket = buckets[bucket_name]
    # No position beyond max_model_len is ever asked for.
    config = dataclasses.replace(config, max_position_embeddings=limits.max_model_len)
    size, is_exact = engine.tensor_parallel_size, engine.tensor_parallel_exact
    shard = Shard(0, size, is_exact, engine.enable_expert_parallel) if size > 1 or is_exact else None
    own = config if shard is None else rank_config(config, shard)
    windows, cache_dtypes = short_windows(config, limits.max_model_len), layer_dtypes(engine, dtype, config)
    use_device(DEVICE, cache_dtypes, config)
    check_cuda_graphs(engine.cuda_graphs, DEVICE)
    on_host = torch.device("cpu")
    buffers = StepBuffers(bucket, limits, on_host, windows, BlockTables(limits, on_host, len(windows)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode if shard is None else contextlib.nullcontext():  # whose rows are numbers
        linears = linears_of(engine, config, DEVICE, dtype)
        if limits.max_loras and bucket.adapters is not False:
            sizes = limits.max_loras, engine.lora_rank, engine.lora_target_modules
            linears = Adaptable(linears, *sizes, num_whole=engine.whole_loras)
        described = family_of(config).describe(config, dtype, linears if shard is None else shared(linears, shard))
    with mode:
        weights, step_input, source = faked((described.weights, buffers.step_input, buffers.feedback))
        if engine.cpu_offload_gb:
            weights = _offloaded(weights, engine.cpu_offload_gb, config.architecture)
        places = dict.fromkeys(windows, _BLOCKS)
        cache = allocate(own, cache_dtypes, _BLOCKS, limits.block_size, DEVICE, places, 1 + limits.num_state_slots)
        feedback = Feedback(
            source,
            torch.empty(bucket.num_rows, dtype=torch.int64, device=DEVICE),
            torch.empty(bucket.num_tokens, config.hidden_size, dtype=dtype, device=DEVICE),
        )
    for tensor in tensors_in((weights, step_input, feedback)):
        mark_static_address(tensor)
    step = step_function(own, bucket.max_query_len, engine.exact, windows)
    return TracedStep(bucket, own, dtype, step, (weights, step_input, cache, feedback), mode, size)


def _offloaded(weights: Any, gib: float, architecture: str) -> Any:
    """Fake ``weights`` of which some layers are in host memory, as ``cpu_offload_gb`` says."""
    layers, chosen = list(weights.layers), chosen_layers(weights, gib, architecture)
    for number in chosen:
        layers[number] = with_weights(layers[number], _in_host_memory)
    return with_fetches(weights._replace(layers=tuple(layers)), chosen, DEVICE)[0]


def _in_host_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def shared(linears: LinearKind, shard: Shard) -> LinearKind:
    """Layers of a rank of several, whose memory is described alone."""
    from compiled_llm.ops.parallel.triton_reductions import bytes_on_gpu  # it loads Triton

    place = torch.zeros(1 + shard.size, dtype=torch.int64)
    memory = torch.empty(bytes_on_gpu(), dtype=torch.uint8, device="meta")
    return Sharding(linears, shard, RankGroup(place, memory))


def faked(tree: Any) -> Any:
    """Nested tuples of tensors of any device as fake ones on the GPU; the same for the same, as where weights are tied.

    Within a fake mode.
    """
    return _Faked().tree(tree)


class _Faked:
    """Keeps which tensor became which."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def tree(self, value: Any) -> Any:
        if isinstance(value, Quantized | QuantizedExperts):
            if id(value) not in self._known:
                self._known[id(value)] = value, self._packed_for_gpu(value)
            return self._known[id(value)][1]
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
                self._known[id(value)] = value, fake
            return self._known[id(value)][1]
        if isinstance(value, Dense):  # only described, for any device
            counters = counters_on(DEVICE, value.out_features, value.in_features)
            return Dense(self.tree(value.weight), self.tree(value.bias), counters)
        if isinstance(value, AnyAdapted):
            value = value._replace(flags=flags_on(DEVICE))
        if isinstance(value, tuple):
            items = map(self.tree, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def _packed_for_gpu(self, layer: Quantized | QuantizedExperts) -> Any:
        """Weights that were only described lie as CPUs read them; a GPU's lie otherwise."""
        experts = layer.num_experts if isinstance(layer, QuantizedExperts) else None
        weight = empty_quantized(layer.scheme.form, layer.out_features, layer.in_features, DEVICE, experts)
        packed = layer._replace(weight=weight)
        return type(layer)(*map(self.tree, packed))
