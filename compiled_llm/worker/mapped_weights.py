"""Weights that an engine maps from a file: made before the first start, found by later ones (kept_weights.py)."""

from pathlib import Path
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.keeping import Keeping
from compiled_llm.checkpoint.kept_weights import (
    KeptWeights,
    LayersWriter,
    fields_of,
    kept_weights,
    opened,
    path_of,
)
from compiled_llm.checkpoint.reader import OnBytes
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.rounding import RowErrors, errors_of
from compiled_llm.ops.trusted_paths import check_trusted


def keeping(config: EngineConfig, device: torch.device, linears: LinearKind) -> LinearKind:
    """The kind ``linears``, whose layers are to be mapped where ``config`` says so. ``ValueError`` on a GPU."""
    if config.weights_path is None:
        return linears
    if device.type != "cpu":
        raise ValueError(
            f"weights_path must be None on {device} (weights are mapped for kernels of a CPU), given "
            f"{config.weights_path!r}"
        )
    return Keeping(linears)


def map_weights(
    kind: Keeping,
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    dtype: torch.dtype,
    size: int,
    on_bytes: OnBytes,
    others: str,
) -> KeptWeights:
    """Let ``kind`` take its layers from the file in ``weights_path``, which is written first if there is none.

    Args:
        size: bytes of the weights, about.
        on_bytes, others: as ``loader.load_weights``.

    Raises:
        ValueError: as ``kept_weights`` and ``loader.load_weights``.
    """
    errors = errors_of(kind.plain)
    fields = _fields(config, model_config, directory, dtype)

    def write(file: LayersWriter) -> None:
        loader.load_weights(
            directory, model_config, dtype, torch.device("cpu"), Keeping(kind.plain, file), on_bytes, others
        )
        if _fields(config, model_config, directory, dtype) != fields:
            raise ValueError(f"{directory}: its files changed while they were read: start again")
        file.errors = errors or ()

    kind.file = found = kept_weights(_directory(config), config.weights_bytes, fields, size, write)
    if errors is not None and not errors:
        errors += (RowErrors(*one) for one in found.errors)
    return found


def verified(config: EngineConfig, model_config: ModelConfig, directory: Path, dtype: torch.dtype) -> str:
    """What is kept of a model, in words: all of it is read and compared with its digests.

    Raises:
        ValueError: it is not what was written, or others may write to the directory.
    """
    path = path_of(_directory(config), fields := _fields(config, model_config, directory, dtype))
    if not path.exists():
        return f"none in {path.parent} yet: the next start packs and keeps them"
    check_trusted(path.parent, "weights_path", "weights are not mapped")
    if (found := opened(path, fields)) is None:
        return f"damaged ones were removed from {path.parent}: the next start packs and keeps them"
    found.verify()
    return f"{path}, {found.nbytes / 2**20:,.1f} MiB, all of it as it was written"


def _directory(config: EngineConfig) -> Path:
    assert config.weights_path is not None
    return Path(config.weights_path).expanduser()


def _fields(config: EngineConfig, model_config: ModelConfig, directory: Path, dtype: torch.dtype) -> Any:
    return fields_of(config, model_config, dtype, (one.path for one in loader.located(directory).values()))
