"""Prompts in all their forms -> token ids, checked before any work is done on them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.sampling_params import SamplingParams
from compiled_llm.tokenizer import Tokenizer


class EncodedPrompt(NamedTuple):
    """A text and its token ids, from a chat template, which a tokenizer alone would not get from the text."""

    text: str
    token_ids: list[int]


Prompt = str | Sequence[int] | Mapping[str, Any] | EncodedPrompt


# No token is longer, so that a longer text cannot fit and need not be encoded to know it.
MAX_CHARACTERS_PER_TOKEN = 256
_MAX_SALT_CHARACTERS = 1024


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or a list of them -> a list. A list of integers is one prompt."""
    if isinstance(prompts, str | bytes | Mapping | EncodedPrompt) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, capacity: int, truncate_prompt_tokens: int | None = None
) -> tuple[str | None, list[int], str]:
    """(text, token ids, cache salt) of a prompt in any of its forms; the text is None when ids were given.

    Requests share cached KV blocks only with those of the same ``cache_salt``, a key that a prompt given as a dict may
    have, so that users who must not learn of each other's prompts by their speed do not.

    Args:
        capacity: most tokens that a request can ever have. A text that so many could not hold is refused.
        truncate_prompt_tokens: keep so many token ids at the end of a longer prompt; -1: as many as leave room for one
            more. Of a text that would be refused, the end is looked at alone.

    Raises:
        ValueError: it has no such form, is empty, has more text than ``capacity`` tokens could hold, or is text for a
            model without a tokenizer; or ``truncate_prompt_tokens`` leaves no room for an output.
    """
    keep = capacity - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    if keep is not None and keep >= capacity:
        raise ValueError(
            f"truncate_prompt_tokens must be below {capacity}, the most tokens of a request, given {keep}: -1 keeps as "
            "many as fit"
        )
    cache_salt = ""
    if isinstance(prompt, EncodedPrompt):
        if not prompt.token_ids:
            raise ValueError("prompt must have at least one token, given none by the chat template")
        return prompt.text, _last(prompt.token_ids, keep), cache_salt
    if isinstance(prompt, Mapping):
        keys = set(prompt) - {"cache_salt"}
        if keys not in ({"prompt"}, {"prompt_token_ids"}):
            raise ValueError(
                "a prompt given as a dict must have one key, 'prompt' or 'prompt_token_ids', beside an optional "
                f"'cache_salt', given {sorted(map(str, prompt))}"
            )
        cache_salt = prompt.get("cache_salt", "")
        if not isinstance(cache_salt, str) or len(cache_salt) > _MAX_SALT_CHARACTERS:
            raise ValueError(
                f"cache_salt must be a str of at most {_MAX_SALT_CHARACTERS} characters, given {cache_salt!r:.100}"
            )
        _check_unicode("cache_salt", cache_salt)
        (key,) = keys
        prompt = prompt[key]
        if isinstance(prompt, str) != (key == "prompt"):
            raise ValueError(f"{key} must be {'a str' if key == 'prompt' else 'a list of token ids'}")
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt must not be empty, given ''")
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompt_token_ids, or the tokenizer argument")
        most = MAX_CHARACTERS_PER_TOKEN * capacity
        if len(prompt) > most and keep is None:
            raise ValueError(f"prompt is too long: {len(prompt)} characters cannot be less than {capacity} tokens")
        _check_unicode("prompt", prompt)
        token_ids = tokenizer.encode(prompt[-most:])
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise ValueError(f"prompt must be a str, a list of token ids or a dict, given {type(prompt).__name__}")
    else:
        token_ids = list(prompt)  # type: ignore[arg-type]  # what its items are, check_token_ids says
    if not token_ids:
        raise ValueError("prompt must have at least one token, given none")
    return prompt if isinstance(prompt, str) else None, _last(token_ids, keep), cache_salt


def _last(token_ids: list[int], count: int | None) -> list[int]:
    return token_ids if count is None else token_ids[-count:]


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode: {error}") from error


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """``ValueError`` unless all are ids of the vocabulary."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} must be integers from 0 to {vocab_size - 1}, given {token_id!r}")


def pair_sampling_params(sampling_params: Any, count: int) -> list[Any]:
    """One for each of ``count`` prompts."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence):
        raise ValueError(f"sampling_params must be a SamplingParams or a list, given {type(sampling_params).__name__}")
    if len(sampling_params) != count:
        raise ValueError(
            f"sampling_params must be one or as many as the prompts, {count}, given {len(sampling_params)}"
        )
    return list(sampling_params)


def pair_priorities(priority: Any, count: int) -> list[int]:
    """One for each of ``count`` prompts; 0 where none is given."""
    if priority is None:
        return [0] * count
    if isinstance(priority, str) or not isinstance(priority, Sequence):
        raise ValueError(f"priority must be a list of integers, one for each prompt, given {priority!r}")
    if len(priority) != count:
        raise ValueError(f"priority must have as many integers as there are prompts, {count}, given {len(priority)}")
    return list(priority)
