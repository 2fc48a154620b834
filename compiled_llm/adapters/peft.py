"""An adapter as PEFT publishes it: its tensors, checked against the base model, as the layers' slots take them."""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.adapters.peft_config import CONFIG_FILE, MERGE, PeftConfig
from compiled_llm.checkpoint.stored_tensors import StoredTensor, listed, stored_tensors
from compiled_llm.models.linears.adapted import Change, Place
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.ops.linear.lora import tiles_of

TENSORS_FILE = "adapter_model.safetensors"
_DTYPES = ("F32", "F16", "BF16")
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What modules are within, in transformers' model, and checkpoints leave out or call otherwise.
_WITHIN = ("model", "language_model", "text_model", "transformer", "gpt_neox", "backbone")
_OTHER_TENSORS = {
    ".lora_magnitude_vector": "a DoRA's",
    ".lora_B.bias": "a bias",
    ".lora_embedding_A": "an embedding's",
    ".lora_embedding_B": "an embedding's",
    ".base_layer.weight": "a copy of the base model's",
    ".trainable_tokens_delta": "changed embeddings",
}


class Adapter:
    """An adapter in host memory. Nothing changes it.

    Attributes:
        digest: of all that decides what it computes: equal digests are equal adapters.
        changes: by the names of the base model's layers.
    """

    def __init__(self, name: str, digest: str, changes: Mapping[str, Change]) -> None:
        self.name, self.digest, self.changes = name, digest, changes

    def __repr__(self) -> str:
        return f"<Adapter {self.name!r}: {len(self.changes)} layers, {self.digest[:12]}>"


class _Pair(NamedTuple):
    """The tensors of one module."""

    a: StoredTensor
    b: StoredTensor


def stamp(directory: Path) -> tuple[tuple[int, int, int], ...]:
    """What changes when the files of an adapter do. ``ValueError`` where one is missing."""
    stamps = []
    for name in (CONFIG_FILE, TENSORS_FILE):
        try:
            status = os.stat(directory / name)
        except (OSError, ValueError) as error:
            raise ValueError(_missing(directory, name, error)) from error
        stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def _missing(directory: Path, name: str, error: Exception) -> str:
    if name == TENSORS_FILE and (directory / "adapter_model.bin").exists():
        return (
            f"{directory}: adapter_model.bin can hold code and is not read: save the adapter as safetensors (PEFT's "
            "save_pretrained does)"
        )
    return f"{directory}: lora_path must be a directory with {CONFIG_FILE} and {TENSORS_FILE}: {error}"


def read_adapter(name: str, directory: Path, places: Mapping[str, Place], most_rank: int) -> Adapter:
    """The adapter in ``directory``.

    Args:
        places: of the base model's layers that adapters may change, by their names in its checkpoint.
        most_rank: the engine's ``max_lora_rank``.

    Raises:
        ValueError: a file is missing, damaged or has what is not served, or does not fit the base model.
    """
    config, path = PeftConfig.read(directory), directory / TENSORS_FILE
    pairs = _pairs(path, stored_tensors(path))
    modules = _layers_of(path, pairs, places)
    _check_complete(config, modules, places)
    digest, changes = hashlib.sha256(), dict[str, Change]()
    for module, layer in sorted(modules.items()):
        place, scale = places[layer], config.scale_of(module)
        _check_shapes(path, config, module, pairs[module], place.part, most_rank)
        dtype = place.changes.a.dtype
        a, b = (_read(path, stored, dtype) for stored in pairs[module])
        for part in (layer, repr(scale), str(tuple(a.shape)), str(dtype)):
            digest.update(f"{part}\n".encode())
        for tensor in (a, b):
            digest.update(tensor.view(torch.uint8).numpy().data)
        changes[layer] = _as_slots_take_it(a, b, scale, place.part)
    return Adapter(name, digest.hexdigest(), changes)


def _pairs(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, _Pair]:
    """By module. Every tensor is in one of them."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        end = next((end for end in (_A, _B) if name.endswith(end)), None)
        if end is None or not name.startswith(_PREFIX):
            what = next((f", {what}" for end, what in _OTHER_TENSORS.items() if name.endswith(end)), "")
            raise ValueError(
                f"{path}: must have tensors {_PREFIX}MODULE{_A} and {_B} alone, found {name!r:.200}{what}: {MERGE}"
            )
        halves.setdefault(name.removeprefix(_PREFIX).removesuffix(end), {})[end] = tensor
    alone = [f"{module}{end}" for module, found in halves.items() for end in (_A, _B) if end not in found]
    if alone:
        raise ValueError(f"{path}: lacks tensors whose counterparts it has: {listed(alone)}: save or download it again")
    if not halves:
        raise ValueError(f"{path}: holds no tensor, so the adapter changes nothing: save or download it again")
    return {module: _Pair(found[_A], found[_B]) for module, found in halves.items()}


def _stripped(name: str) -> str:
    words = name.split(".")
    while words[0] in _WITHIN and len(words) > 1:
        words = words[1:]
    return ".".join(words)


def _layers_of(path: Path, modules: Iterable[str], layers: Collection[str]) -> dict[str, str]:
    """Module -> the name of its layer in the base model's checkpoint."""
    by_rest = {_stripped(name): name for name in layers}
    found = {module: module if module in layers else by_rest.get(_stripped(module), "") for module in modules}
    unknown = [module for module, layer in found.items() if not layer]
    if unknown:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"{path}: changes modules that are no linear layers of this model which adapters may change: "
            f"{listed(unknown)}. Those are {', '.join(ends)}; embeddings, heads, routers, experts and products of "
            f"single heads are not among them. Load the adapter's own base model, or {MERGE}"
        )
    return found


def _check_complete(config: PeftConfig, modules: Mapping[str, str], layers: Iterable[str]) -> None:
    """Raise where the config names layers for which there are no tensors."""
    has = set(modules.values())
    module, layer = next(iter(modules.items()))
    within = module.removesuffix(_stripped(layer))  # in transformers' model
    lacking = [name for name in layers if name not in has and config.names(within + _stripped(name))]
    if lacking:
        raise ValueError(
            f"{config.path}: target_modules names modules without tensors in {TENSORS_FILE}: {listed(lacking)}: save "
            "or download the adapter again"
        )


def _check_shapes(
    path: Path, config: PeftConfig, module: str, pair: _Pair, layer: StoredLinear, most_rank: int
) -> None:
    """Raise unless a module's tensors have the shapes of the layer and of the rank that the config says."""
    rank = config.rank_of(module)
    for tensor, shape in zip(pair, ((rank, layer.in_features), (layer.out_features, rank)), strict=True):
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{path}: {tensor.name} must be in {', '.join(_DTYPES)}, found {tensor.dtype:.20}")
        if tensor.shape != shape:
            raise ValueError(
                f"{path}: {tensor.name} must be {list(shape)}, by the base model and the rank {rank} of {CONFIG_FILE}, "
                f"found {list(tensor.shape)}: load the adapter's own base model, or save the adapter again"
            )
    if rank > most_rank:
        raise ValueError(
            f"{path}: the rank of {module} must be at most the engine's max_lora_rank, {most_rank}, found {rank}: give "
            f"max_lora_rank={rank}"
        )


def _read(path: Path, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    tensor = stored.read().to(dtype)
    if not tensor.isfinite().all():
        raise ValueError(
            f"{path}: {stored.name} must have finite numbers in {str(dtype)[6:]}: it is damaged, or dtype too narrow"
        )
    return tensor


def _as_slots_take_it(a: Tensor, b: Tensor, scale: float, layer: StoredLinear) -> Change:
    """In the order of inputs and outputs that the model takes the layer in."""
    if layer.arrange_inputs is not None:
        a = layer.arrange_inputs(a.t()).t().contiguous()
    if layer.arrange is not None:
        b = layer.arrange(b)
    return Change(a, tiles_of(b), scale)
