"""Merging: a checkpoint whose weights have an adapter in them, for whoever serves one adapter alone."""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.adapters.peft import DTYPES, MATRIX, TENSORS_FILE, A, B, by_module
from compiled_llm.adapters.peft_config import MERGE, PeftConfig
from compiled_llm.checkpoint.loader import checked_tensors
from compiled_llm.checkpoint.model_files import model_config
from compiled_llm.checkpoint.stored_tensors import StoredTensor, listed, locate, stored_tensors
from compiled_llm.checkpoint.writing import CheckpointWriter
from compiled_llm.models.linears.names import Names
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.registry import family_of


class Merged(NamedTuple):
    """What was written: how many layers the adapter changed, and the bytes of all tensors."""

    num_layers: int
    nbytes: int


class _Change(NamedTuple):
    """What is added to one weight, ``scale * B A``."""

    part: StoredLinear
    a: StoredTensor
    b: StoredTensor
    scale: float


def merge_adapter(base: Path, adapter: Path, target: Path) -> Merged:
    """Write ``base`` with ``W + scale B A`` in the place of ``W``: computed in float32, rounded once to W's dtype.

    Whole heads and embeddings (``modules_to_save``) are written in the place of the model's.

    One tensor at a time is in memory, and a shard. ``target`` appears when all is written.

    Args:
        base: a directory with a model that is not quantised; adapter: one of PEFT.
        target: new, or an empty directory.

    Raises:
        ValueError: one of them does not allow it.
        OSError: a file cannot be read or written.
    """
    config = model_config(base)
    if config.published:
        raise ValueError(
            f"{base}: must not be quantised, as the sum would be rounded again: give the model that it was made of"
        )
    names = Names()
    family = family_of(config)
    dtype = getattr(torch, config.dtype)
    stored = checked_tensors(base, config, family.describe(config, dtype, names))
    parts = {part.name: part for part in names.parts}
    weights = locate(base)
    changes: dict[str, _Change | StoredTensor] = {}
    for layer, change in _changes(adapter, parts).items():
        weight = stored.get(f"{layer}.weight")
        if weight is None or weights.get(weight.name) != weight:
            raise ValueError(
                f"{base}: has {layer} within a tensor of several layers, which nothing is merged into: {MERGE}"
            )
        changes[weight.name] = change
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"OUT must be a new or empty directory, given {target}")
    unfinished = target.absolute().with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        writer = CheckpointWriter(base, unfinished)
        for name, found in weights.items():
            writer.add(name, _changed(found.read(), changes[name]) if name in changes else found.read())
        nbytes = writer.finish()
        os.replace(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return Merged(len(changes), nbytes)


def _changes(directory: Path, parts: Mapping[str, StoredLinear]) -> dict[str, _Change | StoredTensor]:
    """By layer. ``ValueError``: the adapter changes what is no linear layer, or is not one of the model."""
    config, path = PeftConfig.read(directory), directory / TENSORS_FILE
    if config.parameters or config.tokens:
        raise ValueError(
            f"{config.path}: must change linear layers alone, or bring a head or an "
            f"embedding whole, found target_parameters or tokens: {MERGE}"
        )
    modules, by_end = by_module(path, stored_tensors(path)), {_from_layers(name): name for name in parts}
    layers = {module: by_end.get(_from_layers(module), "") for module in modules}
    counts = Counter(layers.values())
    others = [
        module
        for module, tensors in modules.items()
        if not layers[module]
        or counts[layers[module]] > 1
        or tensors.keys() != ({A, B} if parts[layers[module]].role == "layer" else {MATRIX})
    ]
    if others:
        raise ValueError(
            f"{path}: must have {A} and {B} of linear layers of the model, or whole heads and embeddings, "
            f"alone, found {listed(others)}: {MERGE}"
        )
    without = [
        name
        for name, part in parts.items()
        if name not in set(layers.values()) and (config.names(name) if part.role == "layer" else config.saves(name))
    ]
    if without:
        raise ValueError(
            f"{config.path}: target_modules or modules_to_save names modules without tensors in "
            f"{path}: {listed(without)}"
        )
    changes: dict[str, _Change | StoredTensor] = {}
    for module, layer in layers.items():
        if parts[layer].role != "layer":
            changes[layer] = _whole(path, parts[layer], modules[module][MATRIX])
            continue
        a, b, part = modules[module][A], modules[module][B], parts[layer]
        rank = config.rank_of(module)
        fits = a.shape == (rank, part.in_features) and b.shape == (part.out_features, rank)
        if not fits or not {a.dtype, b.dtype} <= {*DTYPES}:
            raise ValueError(
                f"{path}: {module} must be {part.in_features} x {rank} x {part.out_features}, by the model and the "
                f"rank of {config.path.name}, in {', '.join(DTYPES)}, found {list(a.shape)} of {a.dtype:.20} and "
                f"{list(b.shape)} of {b.dtype:.20}: give its own base model{config.base}"
            )
        changes[layer] = _Change(part, a, b, config.scale_of(module))
    return changes


def _from_layers(name: str) -> str:
    """A module's name from the list of decoder layers on, which checkpoints have within modules of many names."""
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdigit()), 1)
    return ".".join(words[max(0, number - 1) :])


def _whole(path: Path, part: StoredLinear, matrix: StoredTensor) -> StoredTensor:
    if part.also:
        raise ValueError(
            f"{path}: has a whole {part.name} or {part.also}, which are one in the model, and would be two in the "
            "result: serve the adapter with max_lora_modules_to_save"
        )
    if matrix.shape != (part.out_features, part.in_features) or matrix.dtype not in DTYPES:
        raise ValueError(
            f"{path}: {matrix.name} must be {[part.out_features, part.in_features]} in {', '.join(DTYPES)}, found "
            f"{list(matrix.shape)} of {matrix.dtype:.20}"
        )
    return matrix


def _changed(weight: Tensor, change: _Change | StoredTensor) -> Tensor:
    if isinstance(change, _Change):
        return _sum(weight, change)
    matrix = change.read().to(weight.dtype)
    if not matrix.isfinite().all():
        raise ValueError(f"{change.path}: {change.name} must have finite numbers: it is damaged")
    return matrix


def _sum(weight: Tensor, change: _Change) -> Tensor:
    a, b = change.a.read().float(), change.b.read().float()
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"{change.a.path}: {change.part.name} must have finite numbers: it is damaged")
    product = change.scale * (b @ a)
    merged = weight.float() + (product.t() if change.part.transposed else product)
    return merged.to(weight.dtype)
