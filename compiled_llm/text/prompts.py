"""Prompts in all their forms -> token ids, checked before any work is done on them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.api.argument_checks import UnservableError
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.text.tokenizer import Tokenizer


class EncodedPrompt(NamedTuple):
    """A prompt that is encoded already, by a chat template, for example."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


class ScoredPrompt(NamedTuple):
    """A prompt whose continuation is given, and is to be scored; None: the prompt itself is, from its second token on.

    ``prompt``: in any of a prompt's forms. ``continuation``: a str or a list of token ids.
    """

    prompt: Any
    continuation: Any = None


Prompt = str | Sequence[int] | Mapping[str, Any] | EncodedPrompt | ScoredPrompt


class Capacity(NamedTuple):
    """Most tokens that a request can ever have, and what sets that limit.

    Attributes:
        is_scored: whether the prompt has its continuation in it. Else the output needs room for a token.
    """

    num_tokens: int
    limit: str
    is_scored: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Most tokens of a prompt. The last token of a scored text is not computed."""
        return self.num_tokens + (1 if self.is_scored else -1)

    def error(self, given: str) -> ValueError:
        """For a prompt that is too long."""
        most = f"shorter than {self.num_tokens} tokens (the {self.limit}; the output needs one at least)"
        if self.is_scored:
            most = f"at most {self.num_prompt_tokens} tokens with its continuation (one more than the {self.limit})"
        return ValueError(f"prompt must be {most}, given {given}")


# No token is longer, so a longer text cannot fit, and is refused without being encoded.
MAX_CHARACTERS_PER_TOKEN = 256
MAX_SALT_CHARACTERS = 1024


def prompt_list(prompts: Any, name: str = "prompts", one: str = "prompt (str, list of token ids or dict)") -> list[Any]:
    """One prompt or a list of them -> a list. A list of integers is one prompt.

    Raises:
        ValueError: it is neither. What is in a list is not looked at: a prompt of another type fails by itself.
    """
    if isinstance(prompts, str | Mapping | EncodedPrompt | ScoredPrompt):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        raise ValueError(f"{name} must be a {one} or a list of these, given {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def scored_prompts(prompts: Any, continuations: Any) -> list[ScoredPrompt | ValueError]:
    """Each prompt with its continuation, or what is wrong with that; a single prompt goes with all of them.

    ``continuations`` None: each prompt is scored itself.
    """
    items = prompt_list(prompts)
    if continuations is None:
        return [ScoredPrompt(item) for item in items]
    parts = prompt_list(continuations, "continuations", "continuation (str or list of token ids)")
    if len(items) == 1 and len(parts) > 1:
        items *= len(parts)
    if len(items) != len(parts):
        raise ValueError(
            f"continuations must be as many as the prompts, {len(items)} (or any number for one prompt), given "
            f"{len(parts)}"
        )
    return [
        _no_continuation(part) if part is None else ScoredPrompt(item, part)
        for item, part in zip(items, parts, strict=True)
    ]


def _no_continuation(given: Any) -> ValueError:
    return ValueError(f"continuation must be a str or a list of token ids, and not empty, given {shown(given)}")


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    capacity: Capacity,
    truncate_prompt_tokens: int | None = None,
    split_special_tokens: bool = False,
) -> EncodedPrompt:
    """A prompt in any of its forms -> its text and token ids; the text is None when ids were given.

    Only requests of one ``cache_salt`` share cached KV blocks. It is a key that a prompt given as a dict may have, so
    that users who must not learn of each other's prompts by their speed do not.

    Args:
        capacity: of a prompt that is longer, some multiple of it is looked at and no more.
        truncate_prompt_tokens: keep so many token ids at the end of a longer prompt; -1: as many as leave room for one
            more.
        split_special_tokens: special tokens that a text spells are text like any other.

    Raises:
        ValueError: it has no such form, is empty, has more tokens than ``capacity`` allows, or is text for a model
            without a tokenizer; or ``truncate_prompt_tokens`` leaves no room for an output.
    """
    most = capacity.num_tokens
    keep = most - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    if keep is not None and keep >= most:
        raise ValueError(
            f"truncate_prompt_tokens must be below {most}, the most tokens of a request, given {keep}: -1 keeps as "
            "many as fit"
        )
    if isinstance(prompt, EncodedPrompt):
        if isinstance(prompt.token_ids, list) and not prompt.token_ids:
            raise ValueError("prompt must have at least one token, given none by the chat template")
        return EncodedPrompt(prompt.text, _token_list(prompt.token_ids, capacity, keep), prompt.cache_salt)
    prompt, cache_salt = _unpacked(prompt)
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, _encode(prompt, tokenizer, capacity, keep, split_special_tokens), cache_salt)
    return EncodedPrompt(None, _token_list(prompt, capacity, keep), cache_salt)


def encode_scored(
    scored: ScoredPrompt, tokenizer: Tokenizer | None, capacity: Capacity, split_special_tokens: bool = False
) -> tuple[EncodedPrompt, int]:
    """A prompt and its continuation -> both as one prompt, and the index of its first token that is scored.

    Token ids of the continuation follow the prompt's. A text is joined to the prompt's and encoded with it, as it would
    be if it were not cut in two. What is scored then starts with the first token that is none of the prompt's own:
    where the end of the prompt and the start of the continuation become one token, with that token.

    Raises:
        ValueError: as ``encode_prompt``; the continuation is neither a str nor a list of token ids, has no tokens, or
            is text for a prompt of token ids; or nothing is before the first token that is scored.
    """
    prompt, continuation = scored
    capacity = capacity._replace(is_scored=True)
    if continuation is None:
        encoded = encode_prompt(prompt, tokenizer, capacity, None, split_special_tokens)
        if len(encoded.token_ids) < 2:
            raise ValueError("prompt must have at least two tokens to be scored without a continuation, given one")
        return encoded, 1
    if isinstance(continuation, bytes) or not isinstance(continuation, str | Sequence) or not continuation:
        raise _no_continuation(continuation)
    if not isinstance(continuation, str):
        encoded = encode_prompt(prompt, tokenizer, capacity, None, split_special_tokens)
        token_ids = encoded.token_ids + _token_list(continuation, capacity, None)
        return encoded._replace(token_ids=_token_list(token_ids, capacity, None)), len(encoded.token_ids)
    prompt, cache_salt = (prompt, "") if isinstance(prompt, EncodedPrompt) else _unpacked(prompt)
    if not isinstance(prompt, str):
        raise ValueError("continuation must be a list of token ids where the prompt is one, or a chat, given a str")
    context = _encode(prompt, tokenizer, capacity, None, split_special_tokens)
    check_unicode("continuation", continuation)
    token_ids = _encode(prompt + continuation, tokenizer, capacity, None, split_special_tokens)
    start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, token_ids, strict=False)))
    if start == len(token_ids):
        raise ValueError(f"continuation must have at least one token after the prompt, given {shown(continuation)}")
    if start == 0:
        raise ValueError("the first token of the prompt becomes another one by the continuation: give a longer prompt")
    return EncodedPrompt(prompt + continuation, token_ids, cache_salt), start


def _unpacked(prompt: Any) -> tuple[Any, str]:
    """A prompt that may be a dict -> its text or token ids, not checked otherwise, and its ``cache_salt``."""
    if not isinstance(prompt, Mapping):
        return prompt, ""
    if len(prompt) > 2 or set(prompt) - {"cache_salt"} not in ({"prompt"}, {"prompt_token_ids"}):
        raise ValueError(
            "a prompt given as a dict must have one key, 'prompt' or 'prompt_token_ids', beside an optional "
            f"'cache_salt', given {shown(sorted(map(str, itertools.islice(prompt, 5))))}"
        )
    cache_salt = prompt.get("cache_salt", "")
    if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARACTERS:
        raise ValueError(
            f"cache_salt must be a str of at most {MAX_SALT_CHARACTERS} characters, given {shown(cache_salt)}"
        )
    check_unicode("cache_salt", cache_salt)
    key = "prompt" if "prompt" in prompt else "prompt_token_ids"
    if isinstance(prompt[key], str) != (key == "prompt"):
        raise ValueError(f"{key} must be {'a str' if key == 'prompt' else 'a list of token ids'}")
    return prompt[key], cache_salt


def _encode(
    prompt: str, tokenizer: Tokenizer | None, capacity: Capacity, keep: int | None, split_special_tokens: bool
) -> list[int]:
    if not prompt:
        raise ValueError("prompt must not be empty, given ''")
    if tokenizer is None:
        raise UnservableError("the model has no tokenizer: give prompt_token_ids, or the tokenizer argument")
    check_unicode("prompt", prompt)
    most = capacity.num_tokens
    if keep is not None:
        end = prompt[-MAX_CHARACTERS_PER_TOKEN * most :]  # it holds at least as many tokens
        return _token_list(
            _begun_once(tokenizer, tokenizer.encode_end(end, keep, split_special_tokens)), capacity, keep
        )
    if len(prompt) > MAX_CHARACTERS_PER_TOKEN * most:
        raise ValueError(f"prompt is too long: {len(prompt)} characters cannot be less than {most} tokens")
    if excess := tokenizer.excess(prompt, most, split_special_tokens):
        raise capacity.error(f"{excess[0]} in its first {excess[1]} characters alone")
    return _token_list(_begun_once(tokenizer, tokenizer.encode(prompt, split_special_tokens)), capacity, keep)


def _begun_once(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    """Without a second begin-of-text token, where a text has one already, as a rendered chat may."""
    prefix = tokenizer.prefix_ids
    has_two = bool(prefix) and token_ids[: 2 * len(prefix)] == 2 * prefix
    return token_ids[len(prefix) :] if has_two else token_ids


def _token_list(token_ids: Any, capacity: Capacity, keep: int | None) -> list[int]:
    """A list of what is given, or of the last ``keep``. ``check_token_ids`` checks the items."""
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise ValueError(f"prompt must be a str, a list of token ids or a dict, given {type(token_ids).__name__}")
    length = len(token_ids)
    if keep is not None and length > keep:
        return list(token_ids[length - keep :])
    if length > capacity.num_prompt_tokens:
        raise capacity.error(str(length))
    if not token_ids:
        raise ValueError("prompt must have at least one token, given none")
    return list(itertools.islice(token_ids, length))  # no more than its length


def check_unicode(name: str, text: str) -> None:
    """``ValueError`` for half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode: {error}") from error


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """``ValueError`` unless all are ids of the vocabulary."""
    if set(map(type, token_ids)) <= {int} and (not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)):
        return  # as the loop below would find, and faster
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} must be integers from 0 to {vocab_size - 1}, given {shown(token_id)}")


def pair_sampling_params(sampling_params: Any, count: int) -> list[Any]:
    """One for each of ``count`` prompts."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence):
        raise ValueError(f"sampling_params must be a SamplingParams or a list, given {type(sampling_params).__name__}")
    if len(sampling_params) != count:
        given = len(sampling_params)
        raise ValueError(f"sampling_params must be one or as many as the prompts, {count}, given {given}")
    for params in sampling_params:
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, given {type(params).__name__}")
    return list(sampling_params)


def pair_priorities(priority: Any, count: int) -> list[int]:
    """One for each of ``count`` prompts; 0 where none is given."""
    if priority is None:
        return [0] * count
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise ValueError(f"priority must be a list of integers, one for each prompt, given {shown(priority)}")
    if len(priority) != count:
        raise ValueError(f"priority must have as many integers as there are prompts, {count}, given {len(priority)}")
    return list(priority)
