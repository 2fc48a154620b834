"""Tokenizers of the libraries from a model directory: from its files alone, which are data from anywhere."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from compiled_llm.models.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, open_file, read_json, read_optional_json

# The names of files that transformers may read a tokenizer from start with these.
_FILE_PREFIXES = (
    "added_tokens",
    "chat_template",
    "config.json",
    "merges",
    "sentencepiece",
    "special_tokens_map",
    "spiece",
    "tekken",
    "tokenizer",
    "vocab",
)
_OBJECTS = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")


def files_of(directory: Path) -> list[Path]:
    """The files of a directory that transformers may read its tokenizer from."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory")
    paths = [path for path in directory.iterdir() if path.name.startswith(_FILE_PREFIXES)]
    return [*paths, *directory.glob("additional_chat_templates/*")]


def check_files(directory: Path) -> None:
    """``ValueError`` unless all files that a tokenizer may be read from are regular ones, not too large, and JSON."""
    for path in files_of(directory):
        if path.name in _OBJECTS:
            read_json(path, MAX_JSON_BYTES)
        else:
            open_file(path, MAX_TOKENIZER_BYTES if path.name == "tokenizer.json" else MAX_JSON_BYTES).close()


def read_backend(directory: Path) -> Backend:
    """The tokenizer of ``tokenizer.json``, as the tokenizers library reads it; it never cuts or fills up a text.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        backend = Backend.from_file(str(directory / "tokenizer.json"))
    except BaseException as error:
        raise _unreadable(directory, error) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_tokenizer(directory: Path) -> Any:
    """What transformers makes of the files of a directory, which are checked. Never runs code of the directory.

    Raises:
        ValueError: it cannot read them, or the tokenizers library has no part in what it makes.
    """
    from transformers import AutoTokenizer  # a second: only when needed

    try:
        config = _stand_in_config(directory)
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), config=config, trust_remote_code=False, local_files_only=True
        )
    except BaseException as error:  # transformers raises whatever the first unreadable file leads to
        raise _unreadable(directory, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{directory}: the tokenizer needs a tokenizer.json; save it again with transformers")
    return tokenizer


def library_error(what: str, error: BaseException) -> BaseException:
    """What to raise for an error of the tokenizers library: its panics are no ``Exception``."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        return error
    return ValueError(f"the tokenizer cannot {what}: {type(error).__name__}: {str(error)[:200]}")


def _unreadable(directory: Path, error: BaseException) -> BaseException:
    # A panic of the tokenizers library is no Exception, and cannot be imported by name.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return ValueError(
        f"{directory}: tokenizer.json, or a file beside it, is no readable tokenizer: "
        f"{type(error).__name__}: {error!s:.500}"
    )


def _stand_in_config(directory: Path) -> Any:
    """What transformers asks of a model's config to choose the tokenizer's class, without the config's sizes."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    given = read_optional_json(directory / "config.json")
    model_type = given.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    config = AutoConfig.for_model(model_type) if known else PretrainedConfig()
    config.name_or_path = str(directory)
    for name in ("tokenizer_class", "model_name"):
        if isinstance(given.get(name), str):
            setattr(config, name, given[name])
    return config
