"""Model directory -> weights. Every tensor is accounted for: missing, extra and mis-shaped ones are listed by file."""

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.checkpoint.gguf.directory import has_index, locate_gguf
from compiled_llm.checkpoint.reader import CheckpointReader, OnBytes
from compiled_llm.checkpoint.stored_layout import difference, in_family_layout, parts_of
from compiled_llm.checkpoint.stored_tensors import CheckpointError, StoredTensor, have_same_bytes, listed, locate
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import prefix_of
from compiled_llm.models.family import Description
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import LinearKind, Put, PutQuantized
from compiled_llm.models.quantized.scheme import StoredPart, usual_dtypes
from compiled_llm.models.reader import Wanted, WantedCodes
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import Source
from compiled_llm.ops.linear.quantized_weight import WeightFormat, quantize
from compiled_llm.ops.user_warnings import warn

# What quantised checkpoints hold for a cache of 8 bits; kv_cache_dtype says how it is kept here.
_CACHE_SCALES = tuple(f".{x}_{what}" for x in "qkv" for what in ("scale", "zero_point"))


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linears: LinearKind = Dense,
    on_bytes: OnBytes = lambda name, count: None,
    others: str = "",
) -> Any:
    """The weights of ``directory`` in ``dtype`` on ``device``, its linear layers of the kind ``linears``.

    Tensors are read in pieces on several threads, each piece straight into its layer. Tensors of other parts than the
    language model are left, and a warning names the parts; not those whose names begin with ``others``, if given.

    Raises:
        ValueError: a file is missing, cut off or not safetensors, its tensors do not match ``config``, or one holds
            NaN or infinite values.
    """
    description = family_of(config).describe(config, dtype, linears)
    stored = checked_tensors(directory, config, description, others)
    with CheckpointReader(stored, dtype, device, on_bytes) as reader:
        return family_of(config).take(config, Source(reader, linears))


def checked_tensors(
    directory: Path, config: ModelConfig, description: Description[Any], others: str = ""
) -> dict[str, StoredTensor]:
    """Where the tensors of ``directory`` are, by the names of ``description``, as the headers of its files tell.

    Raises:
        ValueError: as ``load_weights``, but for values, which are not read.
    """
    found, prefix = located(directory), prefix_of(config)
    if prefix and not any(prefix in name for name in found):
        raise CheckpointError(
            f"speculative_config: method must be another for {directory}, which has no tensors {prefix}* to draft "
            "with: load the checkpoint as its makers published it, or choose another method"
        )
    stored = in_family_layout(found, description)
    _check(directory, config, description, stored, others)
    return stored


def located(directory: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of a checkpoint. Raises as ``locate`` and ``locate_gguf``."""
    return locate_gguf(directory) if has_index(directory) else locate(directory)


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    linears: LinearKind = Dense,
    on_bytes: OnBytes = lambda name, count: None,
) -> Any:
    """Seeded random weights of the shapes that ``config`` implies: norms near 1, matrices of variance 1 / in_features.

    So activations keep their size through the layers, and the logits are as spread as a model's. A tensor depends on
    ``seed`` and its name, not on the order in which a family takes them.
    """
    return family_of(config).take(config, Source(RandomReader(dtype, device, seed, on_bytes), linears))


class RandomReader:
    """A ``Reader`` that makes seeded random tensors, a matrix as a whole."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int, on_bytes: OnBytes = lambda name, count: None
    ) -> None:
        self.dtype, self.device = dtype, device
        self._seed, self._on_bytes = seed, on_bytes
        self._generator = torch.Generator(device)

    def tensor(self, wanted: Wanted) -> Tensor:
        self._generator.manual_seed(self._seed + zlib.crc32(wanted.name.encode()))
        return self._values(wanted, wanted.shape)

    def rows(self, wanted: Sequence[Wanted], put: Put) -> None:
        start = 0
        for one in wanted:
            count, num_rows = one.matrices()
            if count == 1:
                tensor, region = self.tensor(one), one.region
                if region is None:
                    put(start, tensor)
                else:
                    put(start + region.first, tensor[region.first : region.end, region.left : region.right])
                start += num_rows
                continue
            self._generator.manual_seed(self._seed + zlib.crc32(one.name.encode()))
            for _ in range(count):
                put(start, self._values(one, one.shape[-2:]))
                start += num_rows

    def kept(self, wanted: WantedCodes) -> WeightFormat:
        return wanted.scheme.kept(usual_dtypes(wanted.stored(), self.dtype), self.dtype)

    def quantized(self, wanted: WantedCodes, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        _, scheme, out_features, in_features, stack = wanted
        number = 0 if stack is None else stack.number
        self._generator.manual_seed(self._seed + zlib.crc32(wanted.weight.encode()) + number)
        shape = (out_features, in_features)
        put(0, quantize(self._values(Wanted(wanted.weight, shape, 0.0, in_features**-0.5), shape), scheme.form))
        order = torch.arange(in_features, dtype=torch.int32, device=self.device) if scheme.ordered else None
        return order, torch.ones(1, device=self.device) / 16 if scheme.static_activations else None

    def _values(self, wanted: Wanted, shape: tuple[int, ...]) -> Tensor:
        """The generator's next values; zeros where numbers are whole."""
        if wanted.dtype is not None and not wanted.dtype.is_floating_point:
            return torch.zeros(shape, dtype=wanted.dtype, device=self.device)
        values = torch.empty(shape, dtype=wanted.dtype or self.dtype, device=self.device)
        values.normal_(generator=self._generator).mul_(wanted.std)
        self._on_bytes(wanted.name, values.numel() * self.dtype.itemsize)
        return values.add_(wanted.mean) if wanted.mean else values


def _check(
    directory: Path, config: ModelConfig, description: Description[Any], stored: dict[str, StoredTensor], others: str
) -> None:
    """``CheckpointError`` unless the tensors are what the config implies. Warns of tensors that are left."""
    model, problems = family_of(config), []
    wanted = description.stored
    prefix = prefix_of(config)
    missing = [name for name, one in wanted.items() if name not in stored and one.required]
    if missing:
        problems.append(f"missing: {listed(missing)}")

    extra = [name for name in stored if name not in wanted and not name.endswith(model.derived_tensors)]
    extra = [name for name in extra if name.startswith(prefix) and not (others and name.startswith(others))]
    for name, original in description.may_repeat.items():
        if name in extra:
            extra.remove(name)
            problems += _check_repeated(name, original, wanted.get(original), stored)
    parts = (dict.fromkeys(extra) if prefix else parts_of(extra, config.num_layers)) | {
        name: description.unused[name] for name in extra if name in description.unused
    }
    if config.published:
        parts |= {name: "scales of a KV cache" for name in extra if name.endswith(_CACHE_SCALES)}
    left = Counter(part for part in parts.values() if part is not None)
    extra = [name for name in extra if parts[name] is None]
    if extra:
        found = listed(f"{name:.100} ({stored[name].path.name})" for name in extra)
        problems.append(f"not part of {config.architecture}: {found}")

    wrong = [
        f"{name} ({stored[name].path.name}) is {wrong_one}"
        for name in sorted(wanted.keys() & stored.keys())
        if (wrong_one := difference(stored[name], wanted[name]))
    ]
    if wrong:
        problems.append(f"mismatched: {listed(wrong)}")
    if problems:
        raise CheckpointError(f"{directory}: the checkpoint does not match its config.json; {'; '.join(problems)}")
    if left:
        named = listed(f"{part} ({count} tensors)" for part, count in left.items())
        warn(f"{directory}: left, since the language model has no such parts: {named}")


def _check_repeated(name: str, original: str, wanted: StoredPart | None, stored: dict[str, StoredTensor]) -> list[str]:
    # Some checkpoints hold a shared tensor a second time. It may be left out only if the two are equal.
    if wanted is None and original not in stored:
        return [f"{stored[name].name} cannot be compared with {original}, which is not there or quantised"]
    if original not in stored or (wanted is not None and difference(stored[original], wanted)):
        return []  # which is a problem of its own
    is_like = stored[name][2:4] == stored[original][2:4]
    if is_like and have_same_bytes(stored[name], stored[original]):
        return []
    return [f"{stored[name].name} differs from {stored[original].name}, though they should be one"]
