"""SamplingParams: how a request's tokens are chosen and when it stops. Validated once, frozen."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from compiled_llm.config import integer

_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 1024

# Parameters of the interface that this version does not serve yet, with the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_tokens": (0,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Out of range: ``ValueError`` with the name, what is allowed and was given.

    Attributes:
        max_tokens: most tokens to generate; None: as many as fit in ``max_model_len``.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this; 1 is off.
        seed: the request's random numbers follow from it alone. None: from the engine's seed and the request's order.
        stop: a string or strings that end the output; they are cut off.
        stop_token_ids: token ids that end the output, besides the model's end-of-text ids.
        ignore_eos: go on after an end-of-text token.
        include_stop_str_in_output: leave the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False leaves the text empty, and saves the time.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | str | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, supported in _NOT_YET.items():
            if getattr(self, name) not in supported:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported in this version; leave it at {supported[0]!r}"
                )
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 (1 is off; temperature=0 is greedy), given 0")
        integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, given {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, given False; use stop_token_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number from {low} to {high}, given {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, given {value!r}")


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items: list[Any] = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"stop must be a non-empty string or a list of them, given {value!r}")
    if len(items) > _MAX_STOPS or any(len(item) > _MAX_STOP_CHARACTERS for item in items):
        raise ValueError(f"stop may hold {_MAX_STOPS} strings of {_MAX_STOP_CHARACTERS} characters at most")
    return tuple(items)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"stop_token_ids must be a list of token ids, given {value!r}")
    items = list(value)
    if len(items) > _MAX_STOPS:
        raise ValueError(f"stop_token_ids may hold {_MAX_STOPS} ids at most, given {len(items)}")
    for item in items:
        integer("stop_token_ids", item, 0, 2**31 - 1)
    return tuple(items)
