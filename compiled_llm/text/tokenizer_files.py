"""transformers' tokenizer from a model directory: from its files alone, which are data from anywhere."""

from pathlib import Path
from typing import Any, NamedTuple

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


class TokenizerParts(NamedTuple):
    """What the engine takes of transformers' tokenizer: plain values.

    Attributes:
        backend: the tokenizers library's own, as JSON.
        chat_templates: by name; one without a name is ``"default"``.
        named_tokens: as text.
        unknown_id: what a text that the vocabulary lacks becomes.
    """

    backend: str
    chat_templates: dict[str, str]
    named_tokens: dict[str, str]
    unknown_id: int | None


def read_parts(directory: Path) -> TokenizerParts:
    """The parts of ``read_tokenizer(directory)``."""
    tokenizer = read_tokenizer(directory)
    template = tokenizer.chat_template or {}
    templates = template if isinstance(template, dict) else {"default": template}
    named = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TokenizerParts(tokenizer.backend_tokenizer.to_str(), templates, named, tokenizer.unk_token_id)


def files_of(directory: Path) -> list[Path]:
    """The files of a directory that transformers may read its tokenizer from."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory")
    paths = [path for path in directory.iterdir() if path.name.startswith(_FILE_PREFIXES)]
    return [*paths, *directory.glob("additional_chat_templates/*")]


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory that has a ``tokenizer.json``. Never runs code of the directory.

    Raises:
        ValueError: there is none, or it or a file beside it cannot be read.
    """
    from transformers import AutoTokenizer  # a second: only when needed

    _check_files(directory)
    config = _stand_in_config(directory)
    try:
        if (directory / "tokenizer.json").exists():
            Backend.from_file(str(directory / "tokenizer.json"))  # fails much faster than transformers
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), config=config, trust_remote_code=False, local_files_only=True
        )
    except BaseException as error:  # transformers raises whatever the first unreadable file leads to
        # A panic of the tokenizers library is no Exception, and cannot be imported by name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"{directory}: tokenizer.json, or a file beside it, is no readable tokenizer: "
            f"{type(error).__name__}: {error!s:.500}"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{directory}: the tokenizer needs a tokenizer.json; save it again with transformers")
    return tokenizer


def _check_files(directory: Path) -> None:
    """``ValueError`` unless all files that a tokenizer may be read from are regular ones, not too large, and JSON."""
    for path in files_of(directory):
        if path.name in _OBJECTS:
            read_json(path, MAX_JSON_BYTES)
        else:
            open_file(path, MAX_TOKENIZER_BYTES if path.name == "tokenizer.json" else MAX_JSON_BYTES).close()


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
