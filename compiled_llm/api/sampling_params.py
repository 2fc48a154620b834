"""SamplingParams: how a request's tokens are chosen and when it stops. Validated once, frozen."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from compiled_llm.api.argument_checks import check_fields, integer, number
from compiled_llm.api.names import SAMPLING_PARAMETERS, refuse_unknown_names
from compiled_llm.api.readable import shown
from compiled_llm.api.speculative_config import MOST_DRAFT_TOKENS
from compiled_llm.api.structured_outputs import StructuredOutputsParams

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 300
MAX_BIAS = 100.0
_MAX_ALLOWED = 2**20
_MAX_BAD_WORDS = 1000
_MAX_TRANSFORMS = 64
_MOST = 2**31 - 1
INTEGERS = {
    "n": (1, 256),
    "top_k": (-1, _MOST),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (-1, 1000),
    "prompt_logprobs": (-1, 1000),
    "truncate_prompt_tokens": (-1, _MOST),
    "num_speculative_tokens": (0, MOST_DRAFT_TOKENS),
}
NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


@refuse_unknown_names("sampling parameter", SAMPLING_PARAMETERS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Out of range: ``ValueError`` with the name, what is allowed and was given.

    Logits change in this order: ``logit_bias``, penalties, ``logits_transforms``, masks (``allowed_token_ids``,
    ``bad_words``, ``min_tokens``, ``structured_outputs``); then temperature, top-k, top-p, min-p and
    top-n-sigma choose.

    Attributes:
        n: how many continuations to generate, each with random numbers of its own. They share the prompt's KV blocks.
        max_tokens: most tokens to generate; None: as many as fit in ``max_model_len``.
        min_tokens: tokens that are generated before anything may end the output.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this; 1 is off.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        min_p: keep the tokens that are at least this times as likely as the most likely one; 0 is off.
        top_n_sigma: keep the tokens whose logit is at most this many standard deviations of the logits below the
            largest one; 0 is off. Temperature does not change which tokens stay.
        presence_penalty: subtracted from the logits of tokens that the output has; -2 to 2.
        frequency_penalty: subtracted from the logits of tokens once for each time that the output has them; -2 to 2.
        repetition_penalty: of tokens in prompt or output, positive logits are divided by it, others multiplied; 1 is
            off.
        seed: the request's random noise follows from it, a token's position and its id alone. None: from the engine's
            seed and the request's order.
        stop: a string or strings that end the output; they are cut off.
        stop_token_ids: token ids that end the output, besides the model's end-of-text ids.
        ignore_eos: go on after an end-of-text token.
        include_stop_str_in_output: leave the stop string in the text.
        logprobs: log-probabilities of the tokens chosen and of this many of the most likely ones; -1: of the engine's
            ``max_logprobs``. They are the model's own, of the logits before any of these parameters changes them.
        prompt_logprobs: as ``logprobs``, for the tokens of the prompt, which is then computed whole, cached or not.
        logit_bias: token id -> what is added to its logit, -100 to 100.
        allowed_token_ids: the only tokens that may be generated.
        bad_words: strings that are never completed, at the start of a word or elsewhere.
        structured_outputs: a JSON schema, regex, choice or grammar that the output obeys: a
            ``StructuredOutputsParams``, or a dict of its arguments.
        logits_transforms: name -> argument for those of the engine's ``logits_transforms`` that are to apply.
        truncate_prompt_tokens: serve only this many tokens at the end of a longer prompt; -1: as many as leave room for
            one of output. Special tokens are tokens like others: the begin-of-text token, or a chat's system
            message, may be cut off.
        split_special_tokens: True: special tokens that a prompt's text spells are text like any other; False: they are
            special tokens; None: as the engine's argument of this name says. In a chat's messages they are always text.
        skip_special_tokens: leave special tokens out of the text. A stop string that has one in it stops all the same.
        detokenize: False leaves the text empty, also that of tokens with log-probabilities, and saves the time.
        num_speculative_tokens: most tokens that are drafted for this request in a step, at most as many as the engine's
            ``speculative_config`` says; 0: none. None: as many as that says. No token depends on it.
        output_kind: what each output of ``stream``, ``step`` and the async engine holds: "cumulative", all so far;
            "delta", the text, tokens and log-probabilities since the last output alone, so that joined they are the
            whole; "final", all, once the request has ended. ``generate`` and ``chat`` of ``CompiledEngine`` give the
            final output always.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
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
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    logits_transforms: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    split_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    num_speculative_tokens: int | None = None
    output_kind: Literal["cumulative", "delta", "final"] = "cumulative"

    def __post_init__(self) -> None:
        check_fields(self, INTEGERS, NUMBERS)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, _MOST)
        integer("min_tokens", self.min_tokens, 0, _MOST if self.max_tokens is None else self.max_tokens)
        if self.split_special_tokens is not None and not isinstance(self.split_special_tokens, bool):
            raise ValueError(
                f"split_special_tokens must be True, False or None, given {shown(self.split_special_tokens)}"
            )
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 (1 is off; temperature=0 is greedy), given 0")
        object.__setattr__(self, "stop", _strings("stop", self.stop, MAX_STOPS))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOPS) or ())
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, _MAX_ALLOWED)
        if allowed == ():
            raise ValueError("allowed_token_ids must hold at least one id, or be None, given none")
        object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words, _MAX_BAD_WORDS))
        self._check_structured_outputs()
        transforms = self.logits_transforms
        if transforms is not None:
            if not isinstance(transforms, Mapping) or not all(isinstance(name, str) for name in transforms):
                raise ValueError(f"logits_transforms must be a dict of argument by name, given {shown(transforms)}")
            if len(transforms) > _MAX_TRANSFORMS:
                raise ValueError(f"logits_transforms may name {_MAX_TRANSFORMS} at most, given {len(transforms)}")
            object.__setattr__(self, "logits_transforms", dict(transforms))
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, given 0")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, given False; use stop_token_ids")
        if self.n > 1 and self.greedy:
            raise ValueError(f"n must be 1 with temperature=0, which gives one continuation only, given {self.n}")

    def _check_structured_outputs(self) -> None:
        wanted = self.structured_outputs
        if wanted is None:
            return
        if isinstance(wanted, Mapping):
            try:
                wanted = StructuredOutputsParams(**wanted)
            except TypeError as error:
                raise ValueError(f"structured_outputs: {error}") from error
            object.__setattr__(self, "structured_outputs", wanted)
        if not isinstance(wanted, StructuredOutputsParams):
            kind = type(wanted).__name__
            raise ValueError(f"structured_outputs must be a StructuredOutputsParams or a dict, given {kind}")
        # Each could leave the grammar without a token to go on with.
        for name, off in (("min_tokens", 0), ("allowed_token_ids", None), ("bad_words", ()), ("ignore_eos", False)):
            if (value := getattr(self, name)) != off:
                raise ValueError(f"{name} must be {shown(off)} with structured_outputs, given {shown(value)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens that are there already matter to the logits of the next one."""
        penalises = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalises or bool(self.logits_transforms)

    @property
    def masks_tokens(self) -> bool:
        """Whether some tokens may be banned."""
        return bool(self.allowed_token_ids or self.bad_words or self.min_tokens or self.structured_outputs is not None)

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen."""
        return self.counts_tokens or self.masks_tokens or bool(self.logit_bias)


def derived_seed(text: str) -> int:
    """A seed that follows from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _strings(name: str, value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    items: list[Any] = [None]
    if isinstance(value, str):
        items = [value]
    elif isinstance(value, Iterable):
        items = list(itertools.islice(value, most + 1))
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"{name} must be a non-empty string or a list of them, given {shown(value)}")
    if len(items) > most or any(len(item) > MAX_STOP_CHARACTERS for item in items):
        given = len(items) if len(items) <= most else "more"
        longest = max(map(len, items))
        raise ValueError(
            f"{name} may hold {most} strings of {MAX_STOP_CHARACTERS} characters at most, given {given}, the "
            f"longest of {longest}"
        )
    for item in items:
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} must be valid Unicode, given {shown(item)}: {error}") from error
    return tuple(items)


def _token_ids(name: str, value: Any, most: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, given {shown(value)}")
    items = list(itertools.islice(value, most + 1))
    if len(items) > most:
        raise ValueError(f"{name} may hold {most} ids at most, given more")
    for item in items:
        integer(name, item, 0, _MOST)
    return tuple(items)


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be a dict of bias by token id, given {shown(value)}")
    if len(value) > MAX_BIASES:
        raise ValueError(f"logit_bias may hold {MAX_BIASES} ids at most, given {len(value)}")
    biases = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key  # as JSON has them
        integer("logit_bias: a token id", token_id, 0, _MOST)
        number(f"logit_bias of token {token_id}", bias, -MAX_BIAS, MAX_BIAS)
        biases[token_id] = bias
    return biases
