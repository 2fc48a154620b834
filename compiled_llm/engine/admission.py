"""Admission: a prompt and its parameters are checked against the model, and become a request to be served."""

import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Collection, Sequence

from compiled_llm.api.argument_checks import UnservableError
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.constraints.grammars import GrammarCompiler, GrammarState
from compiled_llm.constraints.token_masks import TokenMask, allows_any
from compiled_llm.engine.completions import Completion, UserRequest
from compiled_llm.models.config import ModelConfig
from compiled_llm.scheduling.request import Request
from compiled_llm.step.logits_transforms import LogitsTransform, field_rows
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.prompts import (
    Capacity,
    EncodedPrompt,
    Prompt,
    ScoredPrompt,
    check_token_ids,
    encode_prompt,
    encode_scored,
)
from compiled_llm.text.tokenizer import Tokenizer

_MAX_BAD_WORD_CHARACTERS = 65_536  # of all words of a request together
_MIN_GRAMMARS = 32  # that are kept compiled


@dataclasses.dataclass
class PreparedRequest:
    """A request before it has a name and a place in the queue. It serves once.

    Attributes:
        stop_token_ids: all token ids that end it, the model's end-of-text ids among them.
        max_num_tokens: most tokens, prompt and output together.
        masks: one for each completion; None where every token may follow.
        texts: one for each completion; None where nothing is decoded.
        score_start: index of the first token of the prompt that is scored; None: tokens are generated.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    masks: list[TokenMask | None]
    texts: list[OutputText | None]
    score_start: int | None = None
    is_used: bool = False

    def __repr__(self) -> str:
        return f"<PreparedRequest: {len(self.prompt.token_ids)} prompt tokens, {self.params}>"


class Admission:
    """Makes requests for one model, in two parts. Any thread may ``prepare``, which may take long; the rest is quick.

    Args:
        capacity: most tokens that a request can ever have.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        transforms: Sequence[LogitsTransform],
        capacity: int,
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._transforms = {transform.name: transform for transform in transforms}
        limit = "max_model_len" if capacity == max_model_len else "size of the KV pool"
        self._capacity = Capacity(capacity, limit)
        self._max_num_seqs = max_num_seqs
        self._grammars: GrammarCompiler | None = None  # made for the first request that has a grammar
        self._making_grammars = threading.Lock()
        self._bad_words = functools.lru_cache(maxsize=32)(self._token_sequences)

    def close(self) -> None:
        """End the processes that follow grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def prepare(self, prompt: Prompt | PreparedRequest, params: SamplingParams | None) -> PreparedRequest:
        """Check and encode a prompt, and compile what its parameters need.

        Args:
            prompt: one that is prepared already stays as it is. Of a ``ScoredPrompt``, the parameters count that
                concern log-probabilities of the prompt.

        Raises:
            ValueError: it could not be served, or has been.
            ImportError: a package is missing that the parameters need.
        """
        if isinstance(prompt, PreparedRequest):
            if prompt.is_used or params not in (None, prompt.params):
                raise ValueError("a prepared request serves once, with the sampling_params it was prepared for")
            return prompt
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, given {type(params).__name__}")
        if isinstance(prompt, ScoredPrompt):
            return self._prepare_score(prompt, params)
        split, keep = self._splits_special_tokens(params), params.truncate_prompt_tokens
        encoded = encode_prompt(prompt, self._tokenizer, self._capacity, keep, split)
        check_token_ids("prompt_token_ids", encoded.token_ids, self._model_config.vocab_size)
        self._check(params)
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= frozenset(self._model_config.eos_token_ids)
        capacity = self._capacity.num_tokens
        max_tokens = capacity if params.max_tokens is None else params.max_tokens
        first = self._mask(params, stop_token_ids)
        copies = [first and first.copy(self._start_grammar(params)) for _ in range(1, params.n)]
        return PreparedRequest(
            prompt=encoded,
            params=params,
            stop_token_ids=stop_token_ids,
            max_num_tokens=min(len(encoded.token_ids) + max_tokens, capacity),
            masks=[first, *copies],
            texts=[self._text(encoded.token_ids, params) for _ in range(params.n)],
        )

    def _prepare_score(self, scored: ScoredPrompt, params: SamplingParams) -> PreparedRequest:
        """The last token is not computed, since nothing follows it; all before it are the request's prompt."""
        assert params.prompt_logprobs is not None
        split = self._splits_special_tokens(params)
        encoded, start = encode_scored(scored, self._tokenizer, self._capacity, split)
        check_token_ids("prompt_token_ids", encoded.token_ids, self._model_config.vocab_size)
        self._check(params)
        return PreparedRequest(encoded, params, frozenset(), len(encoded.token_ids) - 1, [None], [None], start)

    def _splits_special_tokens(self, params: SamplingParams) -> bool:
        own = params.split_special_tokens
        return self._config.split_special_tokens if own is None else own

    def admit(self, request_id: str, prepared: PreparedRequest, priority: int, order: int) -> UserRequest:
        """The request with all its completions.

        Args:
            order: how many requests came before: it decides the random numbers where no seed is given.
        """
        prepared.is_used = True
        params, (text, token_ids, cache_salt) = prepared.params, prepared.prompt
        first_wanted = None if params.prompt_logprobs is None else prepared.score_start or 1
        computed = token_ids if prepared.score_start is None else token_ids[:-1]
        seed = _derived(f"{self._config.seed}/{order}") if params.seed is None else params.seed
        completions = []
        for index, (mask, output_text) in enumerate(zip(prepared.masks, prepared.texts, strict=True)):
            request = Request(
                request_id=request_id if index == 0 else f"{request_id}\0{index}",
                prompt_token_ids=computed,
                sampling_params=params,
                seed=seed if index == 0 else _derived(f"{seed}/{index}"),
                stop_token_ids=prepared.stop_token_ids,
                max_num_tokens=prepared.max_num_tokens,
                arrival_time=time.monotonic(),
                priority=priority,
                cache_salt=cache_salt,
                most_cached_tokens=first_wanted and first_wanted - 1,
                waits_for_tokens=mask is not None and mask.needs_last_token,
                keeps_blocks=index == 0 and params.n > 1,
            )
            completions.append(Completion(index, request, output_text, mask))
        prompt_logprobs: list | None = None if first_wanted is None else [None] * first_wanted
        return UserRequest(request_id, text, list(token_ids), params, completions, prompt_logprobs)

    def _check(self, params: SamplingParams) -> None:
        """Raise for parameters that this model, its tokenizer or the engine's limits do not allow."""
        vocab_size = self._model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(name, tuple(getattr(params, name) or ()), vocab_size)
        if self._tokenizer is None:
            for name, instead in (
                ("stop", "stop_token_ids"),
                ("bad_words", "logit_bias or allowed_token_ids"),
                ("structured_outputs", "allowed_token_ids"),
            ):
                if getattr(params, name):
                    raise UnservableError(f"{name} needs a tokenizer, and the model has none: use {instead}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted, most = getattr(params, name), self._config.max_logprobs
            if wanted is not None and wanted > most:
                raise ValueError(f"{name} must be at most the engine's max_logprobs, {most}, given {wanted}")
        for name, argument in (params.logits_transforms or {}).items():
            if name not in self._transforms:
                raise ValueError(
                    f"logits_transforms must name some of the engine's, {sorted(self._transforms)}, given {shown(name)}"
                )
            field_rows(self._transforms[name], argument, vocab_size)

    def _text(self, token_ids: list[int], params: SamplingParams) -> OutputText | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return OutputText(self._tokenizer, token_ids, params)

    def _mask(self, params: SamplingParams, stop_token_ids: Collection[int]) -> TokenMask | None:
        if not params.masks_tokens:
            return None
        vocab_size = self._model_config.vocab_size
        grammar = self._start_grammar(params)
        mask = TokenMask(
            vocab_size,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params.bad_words or (), self._splits_special_tokens(params)),
            min_tokens=params.min_tokens,
            stop_token_ids=stop_token_ids,
            grammar=grammar,
        )
        if grammar is None and not allows_any(mask.words([], 0), vocab_size):
            raise ValueError(
                "allowed_token_ids, bad_words and min_tokens leave no token to begin with: allow one that is neither a "
                "bad word nor ends the output"
            )
        return mask

    def _start_grammar(self, params: SamplingParams) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        assert self._tokenizer is not None
        with self._making_grammars:
            if self._grammars is None:
                config = self._config
                self._grammars = GrammarCompiler(
                    self._tokenizer,
                    self._model_config.vocab_size,
                    self._model_config.eos_token_ids,
                    max_seconds=config.max_grammar_seconds,
                    max_bytes=config.max_grammar_bytes,
                    most=max(_MIN_GRAMMARS, 2 * self._max_num_seqs),
                )
        return self._grammars.start(params.structured_outputs)

    def _token_sequences(self, words: tuple[str, ...], split_special_tokens: bool) -> list[tuple[int, ...]]:
        """How each word is spelled in tokens at the start of a text, and after a space where that is another way.

        Special tokens in it are text, and special tokens too unless ``split_special_tokens``.
        """
        if not words:
            return []
        assert self._tokenizer is not None
        length = sum(map(len, words))
        if length > _MAX_BAD_WORD_CHARACTERS:
            raise ValueError(
                f"bad_words may have {_MAX_BAD_WORD_CHARACTERS} characters at most, all words together, given {length}"
            )
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        found = [tuple(token_ids) for token_ids in self._tokenizer.encode_pieces(texts, True)]
        if () in found:
            raise ValueError(f"bad_words must be strings that have tokens, given {shown(texts[found.index(())])}")
        special = [] if split_special_tokens else list(filter(self._tokenizer.special_tokens_within, texts))
        if special:
            found += [tuple(token_ids) for token_ids in self._tokenizer.encode_pieces(special)]
        return list(dict.fromkeys(found))


def _derived(text: str) -> int:
    """A seed that follows from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
