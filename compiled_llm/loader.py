"""Model directory -> weights. Every tensor is accounted for: missing, extra and mis-shaped ones are listed by file.

Only safetensors files are read: they hold data, never code. An index may name only files beside itself.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from compiled_llm.models import family
from compiled_llm.models.config import ModelConfig, read_json
from compiled_llm.models.weights import Convert, keep

# Tensors that old checkpoints carry and that follow from the config.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_DATA_FILES = ("*.json", "*.safetensors", "*.jinja")  # of a hub's model: configs, weights, chat templates
_LISTED = 8  # how many names an error message lists of each kind


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file and the tensors."""


def load_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, convert: Convert = keep
) -> Any:
    """The weights of ``directory`` in ``dtype`` on ``device``, read tensor by tensor and converted layer by layer.

    Raises:
        CheckpointError: a file is missing, cut off or not safetensors, or its tensors are not those of ``config``.
    """
    shapes = family(config.architecture).checkpoint_shapes(config)
    locations = _locate(directory)
    _check(config, shapes, locations, {path: _open(path) for path in sorted(set(locations.values()))})
    with tqdm(total=len(shapes), desc="weights", unit="tensor", disable=None, leave=False) as bar:

        def take(name: str) -> Tensor:
            bar.update()
            # A tensor lies in a map of its file. The file is opened for each and small ones are copied, so that the map
            # goes when a matrix is packed. Else all that was read of the file would stay in this process's memory.
            tensor = safe_open(os.fspath(locations[name]), framework="pt").get_tensor(name)
            return tensor.to(device=device, dtype=dtype, copy=tensor.dim() == 1)

        return family(config.architecture).assemble(config, take, convert)


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int, convert: Convert = keep
) -> Any:
    """Seeded random weights of the shapes that ``config`` implies: norms near 1, matrices of variance 1 / in_features.

    So activations keep their size through the layers, and the logits are as spread as a model's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = family(config.architecture).checkpoint_shapes(config)

    def take(name: str) -> Tensor:
        shape = shapes.pop(name)
        values = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * values
        return values.mul_(0.1) if name.endswith(".bias") else values.mul_(shape[-1] ** -0.5)

    weights = family(config.architecture).assemble(config, take, convert)
    assert not shapes, f"assemble() left checkpoint tensors unused: {sorted(shapes)}"
    return weights


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model of this config, from the shapes alone."""
    shapes = family(config.architecture).checkpoint_shapes(config)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(f"{index_path}: {shard!r} is no .safetensors file beside the index")
        missing = sorted({shard for shard in weight_map.values() if not (directory / shard).is_file()})
        if missing:
            raise CheckpointError(f"{index_path}: missing files: {_listed(missing)}")
        locations = {name: directory / shard for name, shard in weight_map.items()}
        for path in sorted(set(locations.values())):
            held = set(_open(path).keys())
            unlisted = sorted(name for name in held if locations.get(name) != path)
            if unlisted:
                raise CheckpointError(f"{path}: holds tensors that the index does not place there: {_listed(unlisted)}")
        return locations
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{directory}: no .safetensors file. Other formats can hold code and are not read.")
    locations = {}
    for path in paths:
        for name in _open(path).keys():  # noqa: SIM118 - safe_open is no dict
            if name in locations:
                raise CheckpointError(f"tensor {name!r} stands in both {locations[name].name} and {path.name}")
            locations[name] = path
    return locations


def _open(path: Path) -> Any:
    """Open a safetensors file after comparing its length with what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if size < 8 or header_size > min(size - 8, 100_000_000):
                raise CheckpointError(f"{path}: not a safetensors file, or cut off within its header")
            header = json.loads(file.read(header_size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + header_size + max(ends, default=0)
        if size != expected:
            raise CheckpointError(f"{path}: holds {size} bytes where its header says {expected}; download it again")
        return safe_open(os.fspath(path), framework="pt")
    except (
        OSError,
        UnicodeDecodeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        SafetensorError,
    ) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error


def _check(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], locations: dict[str, Path], handles: dict[Path, Any]
) -> None:
    problems = []
    missing = [name for name in shapes if name not in locations]
    if missing:
        problems.append(f"missing: {_listed(missing)}")

    extra = [name for name in locations if name not in shapes and not name.endswith(_DERIVED_SUFFIXES)]
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        problems += _check_tied(locations, handles)
    if extra:
        problems.append(f"not part of {config.architecture}: {_listed([f'{n} ({locations[n].name})' for n in extra])}")

    wrong = []
    for name in shapes.keys() & locations.keys():
        path = locations[name]
        try:
            entry = handles[path].get_slice(name)
        except SafetensorError:
            wrong.append(f"{name} (the index says {path.name}, which does not hold it)")
            continue
        if tuple(entry.get_shape()) != shapes[name]:
            wrong.append(f"{name} ({path.name}) is {tuple(entry.get_shape())}, config.json implies {shapes[name]}")
        elif entry.get_dtype() not in ("F32", "F16", "BF16"):
            wrong.append(f"{name} ({path.name}) is {entry.get_dtype()}; allowed: F32, F16, BF16")
    if wrong:
        problems.append(f"mismatched: {_listed(sorted(wrong))}")
    if problems:
        raise CheckpointError("the checkpoint does not match its config.json; " + "; ".join(problems))


def _check_tied(locations: dict[str, Path], handles: dict[Path, Any]) -> list[str]:
    # Some checkpoints store the tied head a second time. It may be left out only if it is the embedding.
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if names[1] not in locations:
        return []
    head, embedding = (handles[locations[name]].get_tensor(name) for name in names)
    same = head.shape == embedding.shape and torch.equal(head, embedding)
    return [] if same else ["lm_head.weight differs from the embedding, though config.json says they are tied"]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


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
