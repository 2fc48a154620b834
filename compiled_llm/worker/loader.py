"""Model directory -> weights. Every tensor is accounted for: missing, extra and mis-shaped ones are listed by file."""

import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.registry import family
from compiled_llm.models.weights import Source
from compiled_llm.worker.checkpoint import DTYPES, CheckpointError, StoredTensor, listed, locate

_DATA_FILES = ("*.json", "*.safetensors", "*.jinja")  # of a hub's model: configs, weights, chat templates

OnTensor = Callable[[str], None]
"""Is called with the name of each tensor that has been read or made."""


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linears: LinearKind = Dense,
    on_tensor: OnTensor = lambda name: None,
) -> Any:
    """The weights of ``directory`` in ``dtype`` on ``device``, its linear layers of the kind ``linears``.

    Tensors are read one by one, and made into linear layers as they come.

    Raises:
        ValueError: a file is missing, cut off or not safetensors, its tensors are not those of ``config``, or one holds
            NaN or infinite values.
    """
    stored = locate(directory)
    _check(directory, config, stored)

    def read(name: str, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        original = stored[name].read()
        tensor = original.to(device=device, dtype=dtype)
        if not _is_finite(tensor):
            what = "NaN or infinite values: the file is damaged"
            if _is_finite(original):
                what = f"values too large for {str(dtype)[6:]}: choose a wider dtype"
            raise CheckpointError(f"{stored[name].path}: {name} holds {what}")
        on_tensor(name)
        return tensor

    return family(config.architecture).take(config, Source(read, device, linears))


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are. One pass at the speed of memory; ``isfinite`` would write what it finds."""
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    linears: LinearKind = Dense,
    on_tensor: OnTensor = lambda name: None,
) -> Any:
    """Seeded random weights of the shapes that ``config`` implies: norms near 1, matrices of variance 1 / in_features.

    So activations keep their size through the layers, and the logits are as spread as a model's. A tensor depends on
    ``seed`` and its name, not on the order in which a family takes them.
    """
    generator = torch.Generator(device)

    def read(name: str, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        generator.manual_seed(seed + zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator).mul_(std)
        on_tensor(name)
        return values.add_(mean) if mean else values

    return family(config.architecture).take(config, Source(read, device, linears))


def _check(directory: Path, config: ModelConfig, stored: dict[str, StoredTensor]) -> None:
    """``CheckpointError`` unless the tensors are those that the config implies."""
    model, problems = family(config.architecture), []
    description = model.describe(config)
    shapes = description.shapes
    missing = [name for name in shapes if name not in stored]
    if missing:
        problems.append(f"missing: {listed(missing)}")

    extra = [name for name in stored if name not in shapes and not name.endswith(model.derived_tensors)]
    for name, original in description.may_repeat.items():
        if name in extra:
            extra.remove(name)
            problems += _check_repeated(name, original, shapes[original], stored)
    if extra:
        found = listed(f"{name:.100} ({stored[name].path.name})" for name in extra)
        problems.append(f"not part of {config.architecture}: {found}")

    wrong = [
        f"{name} ({stored[name].path.name}) is {difference}"
        for name in sorted(shapes.keys() & stored.keys())
        if (difference := _difference(stored[name], shapes[name]))
    ]
    if wrong:
        problems.append(f"mismatched: {listed(wrong)}")
    if problems:
        raise CheckpointError(f"{directory}: the checkpoint does not match its config.json; {'; '.join(problems)}")


def _difference(tensor: StoredTensor, shape: tuple[int, ...]) -> str | None:
    if tensor.shape != shape:
        return f"{tensor.shape!s:.100}, config.json implies {shape}"
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype}; allowed: {', '.join(DTYPES)}"
    return None


def _check_repeated(name: str, original: str, shape: tuple[int, ...], stored: dict[str, StoredTensor]) -> list[str]:
    # Some checkpoints hold a tied tensor a second time. It may be left out only if the two are the same.
    if original not in stored or _difference(stored[original], shape):
        return []  # which is a problem of its own
    is_like = _difference(stored[name], shape) is None
    same = is_like and torch.equal(stored[name].read(), stored[original].read())
    return [] if same else [f"{name} differs from {original}, though config.json says they are tied"]


def model_directory(model: str, revision: str | None = None, name: str = "model") -> Path:
    """The directory of a model: ``model`` itself, or the hub's snapshot of that id with data files alone.

    The hub is asked with the access token of the environment variable HF_TOKEN, or of ``hf auth login``.

    Args:
        revision: branch, tag or commit of a hub id; None: the main branch.
        name: of the argument, for messages.

    Raises:
        ValueError: it is neither, a directory is given a revision, or the hub does not give it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for a directory, such as {model!r}, given {revision!r}")
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ValueError(f"{name}={model!r} is neither a directory nor a hub id ('organisation/name')")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(_DATA_FILES)))
    except Exception as error:  # of the network, the hub or the disk
        at = "" if revision is None else f", revision={revision!r}"
        raise ValueError(f"{name}={model!r}{at} is no directory here, nor to be had as a hub id: {error}") from error
