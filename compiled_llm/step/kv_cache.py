"""The KV cache's memory: the dtype of each layer's, what a token or a state takes, and the tensors themselves."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import FeatureCache, HiddenCache, KVCache, LayerCache, StateCache
from compiled_llm.models.layers.attention import AttentionSpec, windows_kept_apart
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.registry import attention_layers, layers_of
from compiled_llm.ops import native
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size, mark_static_address

_QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
T = TypeVar("T")
Held = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensors of a layer's cache: name -> shape and dtype

_NUM_BLOCKS = DynamicSize("blocks", 7)
_NUM_SLOTS = DynamicSize("slots", 5)


def layer_dtypes(config: EngineConfig, dtype: torch.dtype, model_config: ModelConfig) -> tuple[torch.dtype, ...]:
    """The dtype of each layer's cache, where the model's is ``dtype``. ``ValueError`` for what cannot be served.

    Layers with a state have the model's. Of a stage, those of its own layers.
    """
    name, skipped = config.kv_cache_dtype, config.kv_cache_skip_layers
    if name not in ("auto", dtype_name(dtype), *_QUANTISED):
        raise ValueError(
            f"kv_cache_dtype must be 'auto', the model's dtype, {dtype_name(dtype)!r}, or one of "
            f"{', '.join(map(repr, _QUANTISED))}, given {name!r}"
        )
    layers = layers_of(model_config.whole)
    if skipped and skipped[-1] >= len(layers):
        raise ValueError(
            f"kv_cache_skip_layers must be layers of the model, 0 to {len(layers) - 1}, given {skipped[-1]} in "
            f"{skipped!r}"
        )
    for layer in skipped:
        spec = layers[layer]
        without = "keeps a state" if isinstance(spec, StateSpec) else f"reads that of layer {spec.shares_cache_of}"
        if isinstance(spec, StateSpec) or spec.shares_cache_of is not None:
            raise ValueError(
                f"kv_cache_skip_layers must be layers with a cache of their own, given {layer}, which {without}"
            )
    chosen = _QUANTISED.get(name, dtype)
    dtypes = tuple(
        dtype if layer in skipped or isinstance(spec, StateSpec) else chosen for layer, spec in enumerate(layers)
    )
    return dtypes if model_config.own_layers is None else dtypes[slice(*model_config.own_layers)]


def bytes_per_token(model_config: ModelConfig, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes that a token's keys and values take in all layers, scales included; ``dtypes`` has one for each layer."""
    return sum(bytes_per_layer(model_config, dtypes))


def bytes_per_layer(model_config: ModelConfig, dtypes: Sequence[torch.dtype]) -> list[int]:
    """Bytes of a token in each layer; 0 where it shares the cache of another one, or keeps a state."""
    return [
        _num_bytes(spec.cache_tensors(1, 1, dtype)) if isinstance(spec, AttentionSpec) else 0
        for spec, dtype in zip(layers_of(model_config), dtypes, strict=True)
    ]


def bytes_per_slot(model_config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a request's states in all layers of a model in ``dtype``; 0: no layer keeps one."""
    return sum(
        _num_bytes(spec.state_tensors(1, dtype)) for spec in layers_of(model_config) if isinstance(spec, StateSpec)
    )


def num_tensors(model_config: ModelConfig, dtypes: Sequence[torch.dtype]) -> int:
    """How many tensors a cache consists of; ``dtypes`` has one for each layer."""
    return sum(map(len, _tensors(model_config, dtypes, num_blocks=1, block_size=1, num_slots=1)))


def short_windows(model_config: ModelConfig, max_model_len: int) -> tuple[int, ...]:
    """The windows of layers whose caches are smaller than the others'. The same in all stages."""
    return windows_kept_apart(attention_layers(layers_of(model_config.whole)), max_model_len)


def split_by_window(model_config: ModelConfig, windows: Sequence[int], by_layer: Sequence[T]) -> list[list[T]]:
    """``by_layer`` in parts: of attention without any of ``windows``, of that with each. Shared caches are left out."""
    parts: list[list[T]] = [[] for _ in range(1 + len(windows))]
    for spec, one in zip(layers_of(model_config), by_layer, strict=True):
        if isinstance(spec, AttentionSpec) and spec.shares_cache_of is None:
            parts[1 + windows.index(spec.window) if spec.window in windows else 0].append(one)
    return parts


def of_states(model_config: ModelConfig, by_layer: Sequence[T]) -> list[T]:
    """Of ``by_layer``, those of layers with a state."""
    pairs = zip(layers_of(model_config), by_layer, strict=True)
    return [one for spec, one in pairs if isinstance(spec, StateSpec)]


class BlockTensor(NamedTuple):
    """What one cache tensor has of a block, or of a state.

    Attributes:
        runs: elements of neighbours, of each of which a rank has its part; the block is as many of all runs as it has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[int, ...]


def block_tensors(
    model_config: ModelConfig, dtypes: Sequence[torch.dtype], windows: Sequence[int], block_size: int
) -> list[list[BlockTensor]]:
    """Of the parts of ``split_by_window``, and of layers with a state; ``dtypes`` has one for each layer."""
    found, held = [], _tensors(model_config, dtypes, num_blocks=1, block_size=block_size, num_slots=1)
    for spec, of_layer in zip(layers_of(model_config), held, strict=True):
        runs = {"convolution": spec.runs or spec.convolution[1:]} if isinstance(spec, StateSpec) else {}
        shapes = [(name, shape[1:], dtype) for name, (shape, dtype) in of_layer.items()]
        found.append([BlockTensor(one, dtype, runs.get(name, (math.prod(one),))) for name, one, dtype in shapes])
    parts = [*split_by_window(model_config, windows, found), of_states(model_config, found)]
    return [[tensor for layer in part for tensor in layer] for part in parts]


def allocate(
    model_config: ModelConfig,
    dtypes: Sequence[torch.dtype],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    window_places: Mapping[int, int] | None = None,
    num_slots: int = 0,
) -> KVCache:
    """A zeroed cache; ``dtypes`` has one for each layer.

    On a CPU the blocks of all layers lie together, and so do the slots of all states: a block of all of them is one
    piece of memory. So a first request writes some huge pages, which all layers share, where each layer's keys and
    values would take one of their own. Each block of a tensor is contiguous, and they are equally far apart. What has
    another number of blocks, as layers with a window, has memory of its own: caches of all sizes are alike but for
    their numbers of blocks.

    The tensors are marked for the compiler: their addresses stay, so that CUDA graphs do not copy them, and their
    number of blocks or slots is dynamic, so that what was compiled on one cache runs on another of any size from 2 on.

    Args:
        window_places: window -> blocks of its layers' caches.
        num_slots: of layers with a state, the sink among them.
    """
    places = window_places or {}
    # Examples that differ from each other: the compiler takes sizes that do not for the same one.
    sizes = {window: DynamicSize(f"blocks of window {window}", 11 + 2 * n) for n, window in enumerate(places)}

    layers, wanted = layers_of(model_config), list[_Wanted]()
    for layer, (spec, dtype) in enumerate(zip(layers, dtypes, strict=True)):
        if isinstance(spec, StateSpec):
            size, held = _NUM_SLOTS, spec.state_tensors(num_slots, dtype)
        else:
            size = sizes.get(spec.window, _NUM_BLOCKS)
            held = spec.cache_tensors(places.get(spec.window, num_blocks), block_size, dtype)
        wanted += (_Wanted(layer, name, *kind, size) for name, kind in held.items())
    own: list[dict[str, Tensor]] = [{} for _ in layers]
    for one, tensor in _zeros(wanted, device):
        own[one.layer][one.name] = _marked(tensor, one.num_blocks)

    caches: list[LayerCache | StateCache] = []
    for spec, of_layer in zip(layers, own, strict=True):
        if isinstance(spec, StateSpec):
            caches.append(StateCache(**of_layer))
        else:
            caches.append(LayerCache(**of_layer) if spec.shares_cache_of is None else caches[spec.shares_cache_of])
    return tuple(caches)


def allocate_features(
    kind: type[FeatureCache] | type[HiddenCache], shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> FeatureCache | HiddenCache:
    """Zeroed features, or what they are made of, of ``shape`` [B, S, *], in the blocks of a cache ``allocate`` made."""
    return kind(_marked(native.zeros_on(device, shape, dtype), _NUM_BLOCKS))


class _Wanted(NamedTuple):
    """A tensor of a layer's cache; ``shape`` begins with the number of blocks or slots."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_blocks: DynamicSize


def _zeros(wanted: Sequence[_Wanted], device: torch.device) -> Iterator[tuple[_Wanted, Tensor]]:
    if device.type != "cpu":
        yield from ((one, torch.zeros(one.shape, dtype=one.dtype, device=device)) for one in wanted)
        return
    for num_blocks in dict.fromkeys(one.num_blocks for one in wanted):
        group = [one for one in wanted if one.num_blocks == num_blocks]
        kinds = [(one.shape[1:], one.dtype) for one in group]
        yield from zip(group, native.huge_zeros_in_rows(group[0].shape[0], kinds), strict=True)


def _marked(tensor: Tensor, size: DynamicSize) -> Tensor:
    # Unguarded: another cache at another address is no reason to compile, only to record CUDA graphs again.
    mark_static_address(tensor, guard=False)
    mark_dynamic_size(tensor, 0, size)
    return tensor


def _tensors(
    model_config: ModelConfig, dtypes: Sequence[torch.dtype], num_blocks: int, block_size: int, num_slots: int
) -> list[Held]:
    """For each layer, shape and dtype of its cache's tensors by their names; ``dtypes`` has one for each layer."""
    return [
        spec.state_tensors(num_slots, dtype)
        if isinstance(spec, StateSpec)
        else spec.cache_tensors(num_blocks, block_size, dtype)
        for spec, dtype in zip(layers_of(model_config), dtypes, strict=True)
    ]


def _num_bytes(held: Held) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in held.values())


def describe(model_config: ModelConfig, dtypes: Sequence[torch.dtype], model_dtype: torch.dtype) -> str:
    """Dtype and bytes per token, as "int8, 544 bytes a token, 53.1% of bfloat16's 1024"."""
    kept = [str(layer) for layer, dtype in enumerate(dtypes) if dtype == model_dtype]
    ours, full = (bytes_per_token(model_config, kind) for kind in (dtypes, [model_dtype] * len(dtypes)))
    if len(kept) == len(dtypes):
        return f"{dtype_name(model_dtype)}, {full} bytes a token"
    quantised = next(dtype for dtype in dtypes if dtype != model_dtype)
    name = next(name for name, dtype in _QUANTISED.items() if dtype == quantised)
    skipped = f" ({dtype_name(model_dtype)} in layers {','.join(kept)})" if kept else ""
    return f"{name}{skipped}, {ours} bytes a token, {ours / full:.1%} of {dtype_name(model_dtype)}'s {full}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name that arguments use: "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
