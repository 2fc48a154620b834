"""Digests of a model and of a tokenizer, for the manifest of a run."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.hub import model_directory
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.checkpoint.stored_tensors import StoredTensor, locate
from compiled_llm.models.files import MAX_TOKENIZER_BYTES, open_file
from compiled_llm.text.tokenizer_files import files_of

_CONFIGS = ("config.json", "generation_config.json")
_SAMPLE_BYTES = 4096


def digests_of(config: EngineConfig) -> dict[str, str]:
    """``model_digest`` and ``tokenizer_digest`` of the files that a config names, as "model" and "tokenizer".

    Raises:
        ValueError, OSError: as these do.
    """
    directory = checkpoint_directory(config)
    return {
        "model": model_digest(directory, config.load_format),
        "tokenizer": tokenizer_digest(config, directory),
    }


def model_digest(directory: Path, load_format: str) -> str:
    """SHA-256, in hex, of the configs; and of each tensor its name, dtype, shape and 4 KiB in the middle of its data.

    So it tells checkpoints apart that differ in the training of any tensor, and not those that differ in a few values
    of one. To read all the data would take as long as to load it.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
        OSError: it cannot be read.
    """
    tensors = [] if load_format == "dummy" else sorted(locate(directory).values(), key=_place)
    digest = hashlib.sha256()
    for path, group in itertools.groupby(tensors, key=_path):
        stored = list(group)
        with open_file(path) as file:
            ends = [tensor.offset for tensor in stored[1:]] + [file.seek(0, 2)]
            for tensor, end in zip(stored, ends, strict=True):
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
                file.seek(tensor.offset + max(0, end - tensor.offset - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, end - tensor.offset)))
    _add_files(digest, [path for name in _CONFIGS if (path := directory / name).is_file()])
    return digest.hexdigest()


def tokenizer_digest(config: EngineConfig, directory: Path) -> str:
    """SHA-256, in hex, of all files of the tokenizer.

    Args:
        directory: of the model, which has them unless ``config`` names another.

    Raises:
        ValueError: there is no such directory, or a file is no regular one or too large.
        OSError: one cannot be read.
    """
    if config.tokenizer is not None:
        directory = model_directory(config.tokenizer, config.tokenizer_revision, "tokenizer")
    digest = hashlib.sha256()
    _add_files(digest, sorted(path for path in files_of(directory) if path.is_file()))
    return digest.hexdigest()


def _add_files(digest: "hashlib._Hash", paths: Sequence[Path]) -> None:
    for path in paths:
        with open_file(path, MAX_TOKENIZER_BYTES) as file:
            content = file.read()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)


def _path(tensor: StoredTensor) -> Path:
    return tensor.path


def _place(tensor: StoredTensor) -> tuple[Path, int]:
    return tensor.path, tensor.offset
