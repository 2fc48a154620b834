"""Texts that a model is run over, cut into windows: a file, or what the demo model did not see of Python's library."""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL, checkpoint_directory, load_tokenizer
from compiled_llm.models.config import ModelConfig
from compiled_llm.text.tokenizer import Tokenizer

# Other people's code; the `test` package, which is not installed everywhere and would be most of the text; tables.
LEFT_OUT = ("site-packages/", "dist-packages/", "test/", "lib2to3/tests/data/", "encodings/", "pydoc_data/")
HELD_OUT_ONE_IN = 32
_LEARNED_FILES = 200  # more than a calibration reads
ROWS_AT_ONCE = 64  # of logits in float64: all of a window's take gigabytes where the vocabulary is large


class Window(NamedTuple):
    """Consecutive tokens, and the token after each of them: ``[T]`` each.

    Targets before ``first`` are not the text's but the tokenizer's, which puts them before it: they are not scored.
    """

    token_ids: Tensor
    targets: Tensor
    first: int = 0


class Text(NamedTuple):
    """A text to be read, and how it is cut.

    Attributes:
        path: a file, UTF-8; None: of Python's standard library.
        max_tokens: of the text; None: all.
        window: tokens of a window; None: the model's length, ``most_window`` at most.
        most_window: of the default, for models whose own length would ask for a very large cache.
        learned: of the standard library, what the demo model learned from; else what was held out from it.
    """

    path: Path | None
    max_tokens: int | None = None
    window: int | None = None
    most_window: int = 4096
    learned: bool = False

    @property
    def name(self) -> str:
        if self.path is not None:
            return str(self.path)
        return f"{len(held_out_texts())} files of the standard library held out from the demo model"

    def read(self) -> list[str]:
        """The texts, whose windows are apart. ``ValueError`` where the standard library has other files."""
        if self.path is not None:
            return [self.path.read_text(encoding="utf-8")]
        learned, _ = split_files(read_source_files(_LEARNED_FILES)) if self.learned else ({}, {})
        return list((learned or held_out_texts()).values())

    def windows(
        self, engine: EngineConfig, model: ModelConfig, device: torch.device, next_inside: bool = False
    ) -> list[Window]:
        """The windows, in tokens of the model that ``engine`` names, each after what its tokenizer puts before a text.

        ``next_inside``: the token after a window counts towards its length.

        Raises:
            ValueError: a window is too long, or too short for what is put before a text.
        """
        longest = model.max_position_embeddings
        length = self.window or min(longest, self.most_window)
        if length > longest:
            raise ValueError(f"--window must be at most the model's length, {longest}, given {length}")
        directory = checkpoint_directory(engine)
        tokenizer = load_tokenizer(engine, directory) or Tokenizer(directory)
        documents, count, before = [], 0, tokenizer.prefix_ids
        least = max(1, len(before))
        if length - next_inside < least:
            raise ValueError(
                f"--window must be at least {least + next_inside}, for what the tokenizer puts before a text and a "
                f"token of it, given {length}"
            )
        for text in self.read():
            documents.append(tokenizer.encode(text)[len(before) :])
            count += max(0, len(documents[-1]) - (not before))  # as many as `cut_windows` predicts
            if self.max_tokens is not None and count >= self.max_tokens:
                break
        return cut_windows(documents, length - next_inside, self.max_tokens, device, before)


def cut_windows(
    documents: list[list[int]],
    length: int,
    max_tokens: int | None,
    device: torch.device,
    before: Sequence[int] = (),
) -> list[Window]:
    """Windows that predict the tokens of documents, each of them once; without ``before`` not the first ones.

    Args:
        length: the most tokens of a window, at least 1 and those of ``before``.
        max_tokens: how many are predicted; None: all.
        before: what each window begins with. Without it a window begins with the last token that was predicted.
    """
    assert length >= max(1, len(before))
    windows, left = [], sum(map(len, documents)) if max_tokens is None else max_tokens
    for document in documents:
        start = 0 if before else 1
        while start < len(document) and left > 0:
            first = [*before] or document[start - 1 : start]
            count = min(length - len(first) + 1, left, len(document) - start)
            tokens = torch.tensor([*first, *document[start : start + count]], dtype=torch.int32, device=device)
            windows.append(Window(tokens[:-1], tokens[1:], len(first) - 1))
            start, left = start + count, left - count
    if not windows:
        raise ValueError(f"the text must have at least {'one token' if before else 'two tokens'}")
    return windows


def held_out_texts() -> dict[str, str]:
    """Path -> text of the standard library's files that the demo model was not trained on, as they were then."""
    library, texts = Path(sysconfig.get_path("stdlib")), {}
    for record in json.loads((DEMO_MODEL / "training.json").read_text())["held_out_files"]:
        path = library / record["path"]
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == record["sha256"]:
            texts[record["path"]] = path.read_text(encoding="utf-8")
    if not texts:
        raise ValueError("this Python's standard library has none of the held-out files as they were: give --text FILE")
    return texts


def read_source_files(max_files: int | None) -> dict[str, str]:
    """The standard library's source, path below the library's folder -> text, in the order of a hash of the path."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(library).as_posix() for path in library.rglob("*.py")]
    files: dict[str, str] = {}
    for path in sorted((path for path in paths if not path.startswith(LEFT_OUT)), key=path_hash):
        try:
            text = (library / path).read_bytes().decode("utf-8")
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        is_stub, is_table = len(text) < 200, sum(map(str.isdigit, text)) > 0.12 * len(text)
        if not is_stub and not is_table:
            files[path] = text
        if len(files) == max_files:
            break
    return files


def path_hash(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def split_files(files: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(train, held out). A file's side depends on nothing but its path, so it is the same on every machine."""
    held_out = {path: text for path, text in files.items() if path_hash(path) % HELD_OUT_ONE_IN == 0}
    held_out = held_out or dict(list(files.items())[:1])  # none: a very small try
    return {path: text for path, text in files.items() if path not in held_out}, held_out
