"""Model directory -> weights. Every tensor is accounted for: missing, extra and mis-shaped ones are listed by file."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import family
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.weights import Convert, keep
from compiled_llm.worker.checkpoint import DTYPES, CheckpointError, StoredTensor, listed, locate

# Tensors that old checkpoints carry and that follow from the config.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_DATA_FILES = ("*.json", "*.safetensors", "*.jinja")  # of a hub's model: configs, weights, chat templates


def _ignore(name: str) -> None:
    """For a caller that shows no progress."""


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    convert: Convert = keep,
    on_tensor: Callable[[str], None] = _ignore,
) -> Any:
    """The weights of ``directory`` in ``dtype`` on ``device``, read tensor by tensor and converted layer by layer.

    ``on_tensor`` is called with the name of each tensor that has been read.

    Raises:
        ValueError: a file is missing, cut off or not safetensors, its tensors are not those of ``config``, or one holds
            NaN or infinite values.
    """
    shapes = family(config.architecture).checkpoint_shapes(config)
    stored = locate(directory)
    _check(directory, config, shapes, stored)

    def take(name: str) -> Tensor:
        original = stored[name].read()
        tensor = original.to(device=device, dtype=dtype)
        if not _is_finite(tensor):
            what = "NaN or infinite values: the file is damaged"
            if _is_finite(original):
                what = f"values too large for {str(dtype)[6:]}: choose a wider dtype"
            raise CheckpointError(f"{stored[name].path}: {name} holds {what}")
        on_tensor(name)
        return tensor

    return family(config.architecture).assemble(config, take, convert)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are. One pass at the speed of memory; ``isfinite`` would write what it finds."""
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    convert: Convert = keep,
    on_tensor: Callable[[str], None] = _ignore,
) -> Any:
    """Seeded random weights of the shapes that ``config`` implies: norms near 1, matrices of variance 1 / in_features.

    So activations keep their size through the layers, and the logits are as spread as a model's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = family(config.architecture).checkpoint_shapes(config)

    def take(name: str) -> Tensor:
        shape = shapes.pop(name)
        values = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        on_tensor(name)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * values
        return values.mul_(0.1) if name.endswith(".bias") else values.mul_(shape[-1] ** -0.5)

    weights = family(config.architecture).assemble(config, take, convert)
    assert not shapes, f"assemble() left checkpoint tensors unused: {sorted(shapes)}"
    return weights


def tensor_sizes(config: ModelConfig) -> dict[str, int]:
    """Elements of each tensor of a checkpoint of this config, by its name."""
    shapes = family(config.architecture).checkpoint_shapes(config)
    return {name: torch.Size(shape).numel() for name, shape in shapes.items()}


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model of this config, from the shapes alone."""
    return sum(tensor_sizes(config).values())


def _check(
    directory: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]], stored: dict[str, StoredTensor]
) -> None:
    """``CheckpointError`` unless the tensors are those that the config implies."""
    problems = []
    missing = [name for name in shapes if name not in stored]
    if missing:
        problems.append(f"missing: {listed(missing)}")

    extra = [name for name in stored if name not in shapes and not name.endswith(_DERIVED_SUFFIXES)]
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        problems += _check_tied(shapes, stored)
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


def _check_tied(shapes: dict[str, tuple[int, ...]], stored: dict[str, StoredTensor]) -> list[str]:
    # Some checkpoints store the tied head a second time. It may be left out only if it is the embedding.
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if names[1] not in stored or _difference(stored[names[1]], shapes[names[1]]):
        return []  # which is said by itself
    is_like = _difference(stored[names[0]], shapes[names[1]]) is None
    same = is_like and torch.equal(stored[names[0]].read(), stored[names[1]].read())
    return [] if same else ["lm_head.weight differs from the embedding, though config.json says they are tied"]


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
