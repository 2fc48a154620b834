"""The files of a tokenizer in a model directory, which are data from anywhere: read by the libraries, and by us."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from compiled_llm.api.readable import shown
from compiled_llm.models.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, open_file, read_json, read_optional_json

# How the names of the files begin that transformers may read a tokenizer from.
_FILE_PREFIXES = (
    "added_tokens", "chat_template", "config.json", "merges", "sentencepiece", "special_tokens_map", "spiece",
    "tekken", "tokenizer", "vocab",
)  # fmt: skip
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


# -- What tokenizer_config.json and the files beside it say


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")


class TokenizerConfig(NamedTuple):
    """Attributes:
    named_tokens: text by name, such as ``eos_token``; None: the files say that there is none.
    special_tokens: all texts that the files call special, also the ones with a name.
    added_tokens: the tokens that the files give an id, by their id.
    adds: of ``bos_token`` and ``eos_token``: whether it is put before or after a text; None: as tokenizer.json does.
    chat_templates: by name; one without a name is ``"default"``.
    """

    named_tokens: dict[str, str | None]
    special_tokens: list[AddedToken]
    added_tokens: dict[int, AddedToken]
    adds: dict[str, bool | None]
    chat_templates: dict[str, str]


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Raises:
    ValueError: a file cannot be read, or a field has another type.
    """
    fields = _read(directory, "tokenizer_config.json")
    if "added_tokens_decoder" not in fields:  # files of older versions, which it takes the place of
        fields |= _read(directory, "special_tokens_map.json")
    named, special = {}, []
    for name, value in _named(fields).items():
        token = None if value is None else _token(name, value, True)
        named[name] = token and token.content
        special += [] if token is None else [token]
    for name in _EXTRA:
        tokens = fields.get(name) or []
        if isinstance(tokens, list):
            special += [_token(name, value, True) for value in tokens]
    return TokenizerConfig(
        named_tokens=named,
        special_tokens=special,
        added_tokens=_added_tokens(directory, fields, {token.content for token in special}),
        adds={f"{end}_token": _flag(fields, f"add_{end}_token") for end in ("bos", "eos")},
        chat_templates=_chat_templates(directory, fields.get("chat_template")),
    )


def _read(directory: Path, name: str) -> dict[str, Any]:
    return read_optional_json(directory / name, MAX_JSON_BYTES)


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that name a token, with its text or object; None where there is said to be none."""
    found = {name: value for name, value in fields.items() if name.endswith("_token") and not name.startswith("add_")}
    for name in _EXTRA:
        if isinstance(fields.get(name), dict):
            found |= fields[name]
    standard = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

    def is_token(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, dict) and "content" in value)

    # Fields of other kinds may end alike, such as a switch.
    return {name: value for name, value in found.items() if name in standard or is_token(value)}


def _token(name: str, value: Any, special: bool) -> AddedToken:
    """``special``: what it is where ``value`` does not say."""
    given = {"content": value, "normalized": not special} if isinstance(value, str) else value
    if not isinstance(given, dict) or not isinstance(given.get("content"), str):
        raise ValueError(
            f"tokenizer_config.json: {name} must be a text or an object with 'content', given {shown(value)}"
        )
    flags = {flag: given[flag] for flag in (*_FLAGS, "special") if given.get(flag) is not None}
    for flag, on in flags.items():
        if not isinstance(on, bool):
            raise ValueError(f"tokenizer_config.json: {name}: {flag} must be true or false, given {shown(on)}")
    try:
        given["content"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"tokenizer_config.json: {name} must be valid Unicode: {error}") from error
    return AddedToken(given["content"], **{"special": special, "normalized": not special, **flags})


def _added_tokens(directory: Path, fields: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """From ``added_tokens_decoder``, else from added_tokens.json."""
    decoder = fields.get("added_tokens_decoder")
    if decoder is None:
        texts = _read(directory, "added_tokens.json")
        return {
            _token_id(f"added_tokens.json: {shown(text)}", token_id): _token(text, text, text in special)
            for text, token_id in texts.items()
        }
    if not isinstance(decoder, dict):
        raise ValueError(f"tokenizer_config.json: added_tokens_decoder must be an object, given {shown(decoder)}")
    name = "added_tokens_decoder"
    return {
        _token_id(f"tokenizer_config.json: {name}", key): _token(f"{name}[{shown(key)}]", value, False)
        for key, value in decoder.items()
    }


def _token_id(name: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**32:
        raise ValueError(f"{name}: a token id must be an integer from 0 to 2^32 - 1, given {shown(value)}")
    return number


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"tokenizer_config.json: {name} must be true, false or null, given {shown(value)}")
    return value


def _chat_templates(directory: Path, field: Any) -> dict[str, str]:
    """Templates by name. A file of its own goes before tokenizer_config.json, and that before chat_template.json."""
    name = "tokenizer_config.json: chat_template"
    if field is None:
        field = _read(directory, "chat_template.json").get("chat_template")
        name = "chat_template.json: chat_template"
    found: dict[Any, Any] = {} if field is None else {"default": field}
    if isinstance(field, list):
        if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in field):
            raise ValueError(
                f"{name} must be a text or a list of objects with 'name' and 'template', given {shown(field)}"
            )
        found = {item["name"]: item.get("template") for item in field}
    elif isinstance(field, dict):
        found = field
    for template in found.values():
        if not isinstance(template, str):
            raise ValueError(f"{name} must be a text, given {shown(template)}")
    paths = [("default", directory / "chat_template.jinja")]
    paths += [(path.stem, path) for path in sorted(directory.glob("additional_chat_templates/*.jinja"))]
    return found | {name: _text(path) for name, path in paths if os.path.lexists(path)}


def _text(path: Path) -> str:
    with open_file(path, MAX_JSON_BYTES) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8: {error}") from error
