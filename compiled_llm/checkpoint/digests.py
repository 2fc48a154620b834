"""Digests that tell one model's files from another's."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.checkpoint.loader import located
from compiled_llm.models.files import MAX_TOKENIZER_BYTES, open_file

_CONFIGS = ("config.json", "generation_config.json")
_SAMPLE_BYTES = 4096  # of each tensor


def model_digest(directory: Path, load_format: str) -> str:
    """SHA-256, in hex, of the configs; and of each tensor its name, dtype, shape and 4 KiB in the middle of its data.

    So it tells checkpoints apart that differ in the training of any tensor, and not those that differ in a few values
    of one. To read all the data would take as long as to load it.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
        OSError: it cannot be read.
    """
    stored_tensors = [] if load_format == "dummy" else located(directory).values()
    tensors = sorted(stored_tensors, key=lambda tensor: (tensor.path, tensor.offset))
    digest = hashlib.sha256()
    for path, group in itertools.groupby(tensors, key=lambda tensor: tensor.path):
        stored = list(group)
        with open_file(path) as file:
            ends = [tensor.offset for tensor in stored[1:]] + [file.seek(0, 2)]
            for tensor, end in zip(stored, ends, strict=True):
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
                file.seek(tensor.offset + max(0, end - tensor.offset - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, end - tensor.offset)))
    add_files(digest, [path for name in _CONFIGS if (path := directory / name).is_file()])
    return digest.hexdigest()


def add_files(digest: "hashlib._Hash", paths: Sequence[Path]) -> None:
    """Add the names, sizes and contents of files."""
    for path in paths:
        with open_file(path, MAX_TOKENIZER_BYTES) as file:
            content = file.read()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
