"""The parts of a tokenizer that the engine uses, from a model directory: plain values, which can be kept on disk.

tokenizer.json says how text becomes tokens and tokens become text, as the tokenizers library reads it. transformers'
classes build some of that anew by rules of their own, and so give other tokens than the model was trained with. They
are used where there is no tokenizer.json, and for the names of special tokens that no file gives.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from compiled_llm.api.readable import shown
from compiled_llm.models.files import MAX_JSON_BYTES, read_optional_json
from compiled_llm.text.tokenizer_files import (
    TokenizerConfig,
    check_files,
    library_error,
    read_backend,
    read_tokenizer,
    read_tokenizer_config,
)

# Fields of tokenizer_config.json that a tokenizer for users has, and their types: a value of another type is left out.
_FOR_USERS = {
    "model_max_length": int,
    "padding_side": str,
    "truncation_side": str,
    "clean_up_tokenization_spaces": bool,
}


class TokenizerParts(NamedTuple):
    """Attributes:
    backend: the tokenizers library's own, as JSON: bytes, since a string of all languages takes four times as much.
    chat_templates: by name; one without a name is ``"default"``.
    named_tokens: as text.
    notes: what its user should know, a line each.
    """

    backend: bytes
    chat_templates: dict[str, str]
    named_tokens: dict[str, str]
    notes: tuple[str, ...] = ()


def read_parts(directory: Path, *, compare: bool = True) -> TokenizerParts:
    """The tokenizer of ``directory``. Never runs code of the directory.

    Args:
        compare: ask transformers' class for names of special tokens that no file gives, and whether its tokens are
            others. False saves its import, where tokenizer.json and the files beside it say all.

    Raises:
        ValueError: there is none, it or a file beside it cannot be read, or they give a token two ids.
    """
    check_files(directory)
    if not (directory / "tokenizer.json").exists():
        return _parts_of_class(read_tokenizer(directory))
    backend, config = read_backend(directory), read_tokenizer_config(directory)
    theirs, failure = None, ""
    if compare:
        try:
            theirs = read_tokenizer(directory)
        except ValueError as error:
            failure = _reason(error.__cause__ or error)
    known = {} if theirs is None else _parts_of_class(theirs).named_tokens
    try:
        own = _add_tokens(backend, config)
        known = {name: text for name, text in known.items() if backend.token_to_id(text) is not None}
        named = {name: text for name, text in (known | config.named_tokens).items() if text is not None}
        own += _set_ends(backend, config, named)
        content = backend.to_str().encode()
    except ValueError:
        raise
    except BaseException as error:
        raise library_error(f"be made of {directory / 'tokenizer.json'}", error) from error
    notes = [f"{directory}: {note}" for note in own]
    if failure:
        notes.append(f"{directory}: transformers' class cannot read this tokenizer ({failure}): tokenizer.json is used")
    elif theirs is not None and (note := _compare(directory, backend, theirs)):
        notes.append(note)
    return TokenizerParts(content, config.chat_templates, named, tuple(notes))


def users_tokenizer(directory: Path, parts: TokenizerParts) -> Any:
    """A new tokenizer of transformers with these parts, of its general class, which takes them as they are.

    What does not concern tokens is as tokenizer_config.json has it.
    """
    from transformers import PreTrainedTokenizerFast

    fields = read_optional_json(directory / "tokenizer_config.json", MAX_JSON_BYTES)
    kept = {name: fields[name] for name, kind in _FOR_USERS.items() if isinstance(fields.get(name), kind)}
    templates: Any = parts.chat_templates
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_buffer(parts.backend),
        name_or_path=str(directory),
        is_local=True,  # else the class asks the hub about a path that looks like a name of the hub
        local_files_only=True,
        chat_template=templates["default"] if templates.keys() == {"default"} else templates or None,
        **parts.named_tokens,
        **kept,
    )


def _parts_of_class(tokenizer: Any) -> TokenizerParts:
    """The parts of a tokenizer of transformers."""
    template = tokenizer.chat_template or {}
    templates = template if isinstance(template, dict) else {"default": template}
    named = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TokenizerParts(tokenizer.backend_tokenizer.to_str().encode(), templates, named)


def _add_tokens(backend: Backend, config: TokenizerConfig) -> list[str]:
    """Add the tokens that the files beside tokenizer.json have, and make special what they call special.

    A token without an id that the vocabulary lacks too is not added: no model knows it.
    """
    notes = []
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(config.added_tokens.items()):
        found = backend.token_to_id(token.content)
        own = known.get(token.content)
        if own is None:
            backend.add_tokens([token])
        elif token.special and not own.special:
            backend.add_tokens([_special(own)])
        now = backend.token_to_id(token.content)
        if found is None and now != token_id:
            raise ValueError(
                f"tokenizer_config.json: the token {shown(token.content)} has the id {token_id}, and tokenizer.json, "
                f"which lacks it, has room for it at {now} alone: give a tokenizer.json that has it"
            )
        if now != token_id:
            notes.append(f"the token {shown(token.content)} is {now} by tokenizer.json, and {token_id} by another file")
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in config.special_tokens if token.content not in known]
    backend.add_tokens([token for token in missing if backend.token_to_id(token.content) is not None])
    return notes[:1]


def _special(token: AddedToken) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(token.content, special=True, **flags)


def _set_ends(backend: Backend, config: TokenizerConfig, named: dict[str, str]) -> list[str]:
    """Make the backend put the bos and eos tokens around a text that the files ask for, and no others."""
    before, after = affixes(backend)
    wanted, notes = {"bos_token": before, "eos_token": after}, []
    for name, tokens in wanted.items():
        add, text = config.adds[name], named.get(name)
        token_id = None if text is None else backend.token_to_id(text)
        if token_id is None:
            notes += [f"add_{name} is true, and there is no {name} in the vocabulary: none is added"] if add else []
        elif add and token_id not in tokens:
            wanted[name] = [token_id, *tokens] if name == "bos_token" else [*tokens, token_id]
        elif add is False:
            wanted[name] = [other for other in tokens if other != token_id]
    if (before, after) == (wanted["bos_token"], wanted["eos_token"]):
        return notes
    # Names of our own in the template: a token's text might mean something there.
    names = {token_id: f"T{token_id}" for tokens in wanted.values() for token_id in tokens}
    single = [*(names[token_id] for token_id in wanted["bos_token"]), "$A"]
    single += [names[token_id] for token_id in wanted["eos_token"]]
    special = [
        {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]} for token_id, name in names.items()
    ]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return notes


def affixes(backend: Backend) -> tuple[list[int], list[int]]:
    """The token ids that the tokenizer puts before and after a text."""
    for text in _short_texts(backend):
        own = backend.encode(text, add_special_tokens=False).ids
        if own:
            whole = backend.encode(text).ids
            starts = (at for at in range(len(whole) - len(own) + 1) if whole[at : at + len(own)] == own)
            start = next(starts, None)
            return ([], []) if start is None else (whole[:start], whole[start + len(own) :])
    return [], []


def _short_texts(backend: Backend) -> Iterator[str]:
    """Some of which have tokens, whatever the vocabulary."""
    yield from ("a", "1", " ", ".")
    yield from itertools.islice(backend.get_vocab(with_added_tokens=False), 64)


def _compare(directory: Path, backend: Backend, theirs: Any) -> str | None:
    """A line that says where transformers' class differs, with an example."""
    other = theirs.backend_tokenizer
    other.no_truncation()
    other.no_padding()
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    try:
        found = difference(backend, other, special)
    except BaseException as error:
        if isinstance(library_error("", error), ValueError):
            return f"{directory}: not compared with transformers' tokenizer, which fails: {_reason(error)}"
        raise
    if found is None:
        return None
    name = type(theirs).__name__
    what = "the tokens, decoded, of" if found.in_decoding else "the tokens of"
    return (
        f"{directory}: {what} {found.text!r} are {found.ours!r} by tokenizer.json, which is used, and "
        f"{found.theirs!r} by transformers' {name}; they differ in {found.num_different} of {found.num_texts} texts"
    )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- Where two tokenizers differ, by some hundred texts on which published tokenizers are known to differ


# Each alone, after each other one, and beside special tokens.
_PIECES = (
    *("x", " x", "  x", "   x y", "Hello, world!", "don't I'LL", "12345", " 3.14%", "x_1", "naïve café"),
    *("\n", "\n\n", "\t", " \n ", "\r\n", "x =\n    1", "\n    return x\n", ":\n\t\tpass"),
    *(
        "你好，世界",
        "cafe\u0301 A\u030a",
        "\u1100\u1161 ﬁ Ａ １",
        "🚀👩‍💻",
        "สวัสดี",
        "नमस्ते",
        "مرحبا",
        "\u00a0\u3000\u200b",
    ),
)
_MAX_SPECIAL, _MAX_CHARACTERS = 12, 100  # special tokens that are tried
_MAX_SHOWN = 12  # tokens of an example


class Difference(NamedTuple):
    """Attributes:
    text: the shortest of the texts that differ.
    ours, theirs: its tokens.
    num_different, num_texts: how many of the texts differ, and how many there are.
    in_decoding: the tokens are equal, and the text that is made of them differs.
    """

    text: str
    ours: list[str]
    theirs: list[str]
    num_different: int
    num_texts: int
    in_decoding: bool


def probe_texts(special_tokens: Iterable[str]) -> list[str]:
    """Code, spaces, line breaks, scripts, signs in several parts, and ``special_tokens`` with text around them."""
    texts = [*_PIECES, *("".join(pair) for pair in itertools.product(_PIECES, repeat=2))]
    short = (token for token in special_tokens if len(token) <= _MAX_CHARACTERS)
    for token in itertools.islice(short, _MAX_SPECIAL):
        texts += [token, f"x{token}x", f" {token} x", f"x {token}\n  x", f"{token}{token}", f"{token}你好 12"]
    return texts


def difference(ours: Backend, theirs: Backend, special_tokens: Iterable[str]) -> Difference | None:
    """Compares tokens, and the text that is made of ours. None: no text differs."""
    texts = sorted(probe_texts(special_tokens), key=len)
    pairs = list(zip(ours.encode_batch(texts), theirs.encode_batch(texts), strict=True))
    encoded = [index for index, (one, other) in enumerate(pairs) if one.ids != other.ids]
    if encoded:
        first = encoded[0]
        one, other = pairs[first]
        return Difference(texts[first], _cut(one.tokens), _cut(other.tokens), len(encoded), len(texts), False)
    ids = [one.ids for one, _ in pairs]
    read, others = ours.decode_batch(ids), theirs.decode_batch(ids)
    decoded = [index for index, (one, other) in enumerate(zip(read, others, strict=True)) if one != other]
    if not decoded:
        return None
    first = decoded[0]
    return Difference(texts[first], [read[first]], [others[first]], len(decoded), len(texts), True)


def _cut(tokens: list[str]) -> list[str]:
    return tokens if len(tokens) <= _MAX_SHOWN else [*tokens[:_MAX_SHOWN], "..."]
