"""Prompts in all their forms -> token ids, checked before any work is done on them."""

from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

# No token is longer, so that a longer text cannot fit and need not be encoded to know it.
_MAX_CHARACTERS_PER_TOKEN = 256


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or a list of them -> a list. A list of integers is one prompt."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, max_tokens: int) -> tuple[str | None, list[int]]:
    """(text, token ids) of a prompt in any of its forms; the text is None when ids were given.

    Raises:
        ValueError: it has no such form, is empty, has more text than ``max_tokens`` tokens could hold, or is text for a
            model without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise ValueError(
                "a prompt given as a dict must have one key, 'prompt' or 'prompt_token_ids', given "
                f"{sorted(map(str, prompt))}"
            )
        ((key, prompt),) = prompt.items()
        if isinstance(prompt, str) != (key == "prompt"):
            raise ValueError(f"{key} must be {'a str' if key == 'prompt' else 'a list of token ids'}")
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt must not be empty, given ''")
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompt_token_ids, or the tokenizer argument")
        if len(prompt) > _MAX_CHARACTERS_PER_TOKEN * max_tokens:
            raise ValueError(f"prompt is too long: {len(prompt)} characters cannot be less than {max_tokens} tokens")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt must be valid Unicode: {error}") from error
        token_ids = tokenizer.encode(prompt)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise ValueError(f"prompt must be a str, a list of token ids or a dict, given {type(prompt).__name__}")
    else:
        token_ids = list(prompt)  # type: ignore[arg-type]  # what its items are, check_token_ids says
    if not token_ids:
        raise ValueError("prompt must have at least one token, given none")
    return prompt if isinstance(prompt, str) else None, token_ids


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """``ValueError`` unless all are ids of the vocabulary."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} must be integers from 0 to {vocab_size - 1}, given {token_id!r}")
