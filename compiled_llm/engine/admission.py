"""Admission: a prompt and its parameters are checked against the model, and become a request to be served."""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future

from compiled_llm.adapters.host_adapters import HeldRequest, HostAdapters
from compiled_llm.adapters.peft import Adapter
from compiled_llm.api.argument_checks import UnservableError
from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.api.lora_request import LoRARequest, check_lora_request
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams, derived_seed
from compiled_llm.constraints.mask_maker import MaskMaker
from compiled_llm.constraints.token_masks import TokenMask
from compiled_llm.engine.completions import Completion, UserRequest
from compiled_llm.models.config import ModelConfig
from compiled_llm.scheduling.request import BlockSource, Request, RequestId
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


@dataclasses.dataclass
class PreparedRequest:
    """A request before it has a name and a place in the queue. It serves once.

    Attributes:
        stop_token_ids: all token ids that end it, the model's end-of-text ids among them.
        max_num_tokens: most tokens, prompt and output together.
        masks: one for each completion; None where every token may follow.
        texts: one for each completion; None where nothing is decoded.
        score_start: index of the first token of the prompt that is scored; None: tokens are generated.
        adapter: None: the base model serves it.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    masks: list[TokenMask | None]
    texts: list[OutputText | None]
    score_start: int | None = None
    adapter: HeldRequest | None = None
    is_used: bool = False

    def __repr__(self) -> str:
        return f"<PreparedRequest: {len(self.prompt.token_ids)} prompt tokens, {self.params}>"


def seed_of(seed: int, number: int) -> int:
    """The seed of a request's continuation of this number, from that of the first."""
    return derived_seed(f"{seed}/{number}") if number else seed


class Admission:
    """Makes requests for one model, in two parts. Any thread may ``prepare``, which may take long; ``admit`` is quick.

    Args:
        capacity: most tokens that a request can ever have.
        adapters: None: the engine serves none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        transforms: Sequence[LogitsTransform],
        limits: EngineLimits,
        capacity: int,
        adapters: HostAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._config, self._model_config, self._tokenizer = config, model_config, tokenizer
        self._transforms = {transform.name: transform for transform in transforms}
        self._num_draft_tokens = limits.num_draft_tokens
        limit = "max_model_len" if capacity == limits.max_model_len else "size of the KV pool"
        self._capacity = Capacity(capacity, limit)
        eos_token_ids, vocab_size = model_config.eos_token_ids, model_config.vocab_size
        self._masks = MaskMaker(config, tokenizer, vocab_size, eos_token_ids, limits.max_num_seqs)

    def close(self) -> None:
        """End the processes that follow grammars, and the threads that read adapters."""
        self._masks.close()
        if self._adapters is not None:
            self._adapters.close()

    def prepare(
        self, prompt: Prompt | PreparedRequest, params: SamplingParams | None, lora_request: LoRARequest | None = None
    ) -> PreparedRequest:
        """Check and encode a prompt, compile what its parameters need, and read its adapter if it is not here.

        Args:
            prompt: one that is prepared already stays as it is. Of a ``ScoredPrompt``, the parameters count that
                concern log-probabilities of the prompt.

        Raises:
            ValueError: it could not be served, or has been.
            ImportError: a package is missing that the parameters need.
        """
        if isinstance(prompt, PreparedRequest):
            if prompt.is_used or params not in (None, prompt.params) or lora_request is not None:
                raise ValueError(
                    "a prepared request serves once, with the sampling_params and the lora_request it was prepared for"
                )
            return prompt
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, given {type(params).__name__}")
        own = params.split_special_tokens
        split = self._config.split_special_tokens if own is None else own
        arguments = self._tokenizer, self._capacity
        if isinstance(prompt, ScoredPrompt):
            encoded, score_start = encode_scored(prompt, *arguments, split)
        else:
            encoded, score_start = encode_prompt(prompt, *arguments, params.truncate_prompt_tokens, split), None
        token_ids = encoded.token_ids
        check_token_ids("prompt_token_ids", token_ids, self._model_config.vocab_size)
        self._check(params)
        adapter = self._adapter(lora_request)
        if score_start is not None:  # the last token is not computed, since nothing follows it
            return PreparedRequest(
                encoded, params, frozenset(), len(token_ids) - 1, [None], [None], score_start, adapter
            )
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= frozenset(self._model_config.eos_token_ids)
        capacity = self._capacity.num_tokens
        end = capacity if params.max_tokens is None else min(len(token_ids) + params.max_tokens, capacity)
        masks = self._masks.masks(params, stop_token_ids, split)
        texts = [self._text(token_ids, params) for _ in range(params.n)]
        return PreparedRequest(encoded, params, stop_token_ids, end, masks, texts, adapter=adapter)

    def begin_reading(self, lora_request: LoRARequest | None) -> "Future[LoRARequest | None]":
        """Read an adapter in another thread, unless it is here; ``prepare`` looks at no file if it is given the result.

        What is wrong with the adapter, or with ``lora_request``, is the future's error.
        """
        found: Future[LoRARequest | None] = Future()

        def end(reading: "Future[Adapter]") -> None:
            if reading.cancelled():
                return  # the engine is closed, which ends its requests
            error = reading.exception()
            if error is not None:
                found.set_exception(error)
            else:
                assert lora_request is not None
                found.set_result(HeldRequest(lora_request.lora_name, lora_request.lora_path, reading.result()))

        try:
            check_lora_request(lora_request)
            if lora_request is None:
                found.set_result(None)
            else:
                self.host_adapters.begin(lora_request).add_done_callback(end)
        except ValueError as error:
            found.set_exception(error)
        return found

    @property
    def host_adapters(self) -> HostAdapters:
        """``UnservableError`` for an engine that serves none."""
        if self._adapters is None:
            raise UnservableError(
                "lora_request must be None unless the engine has enable_lora=True, given a LoRARequest"
            )
        return self._adapters

    def admit(
        self,
        request_id: str,
        prepared: PreparedRequest,
        priority: int,
        order: int,
        output_token_ids: Sequence[int] = (),
        source: BlockSource | None = None,
    ) -> UserRequest:
        """The request with all its completions.

        Args:
            order: how many requests came before: it decides the random numbers where no seed is given.
            output_token_ids: that are known already.
            source: another engine that has blocks of it.

        Raises:
            ValueError: these do not leave a token to generate, or belong to more than one continuation.
        """
        self._check_known(prepared, output_token_ids)
        prepared.is_used = True
        params, (text, token_ids, cache_salt) = prepared.params, prepared.prompt
        first_scored = None if params.prompt_logprobs is None else prepared.score_start or 1
        computed = token_ids if prepared.score_start is None else token_ids[:-1]
        seed = derived_seed(f"{self._config.seed}/{order}") if params.seed is None else params.seed
        completions = []
        for index, (mask, output_text) in enumerate(zip(prepared.masks, prepared.texts, strict=True)):
            is_first = index == 0  # it computes the prompt for all
            request = Request(
                request_id=RequestId(request_id, index),
                prompt_token_ids=computed,
                sampling_params=params,
                seed=seed_of(seed, index),
                stop_token_ids=prepared.stop_token_ids,
                max_num_tokens=prepared.max_num_tokens,
                arrival_time=time.monotonic(),
                priority=priority,
                cache_salt=cache_salt,
                adapter="" if prepared.adapter is None else prepared.adapter.digest,
                adapter_name="" if prepared.adapter is None else prepared.adapter.lora_name,
                mask=mask,
                scored_token_ids=token_ids if first_scored and is_first else (),
                num_scored=first_scored or 0,
                waits_for_tokens=mask is not None and mask.needs_last_token,
                keeps_blocks=is_first and params.n > 1,
                output_token_ids=list(output_token_ids),
                source=source if is_first else None,
            )
            completions.append(Completion(index, request, output_text, mask))
        prompt_logprobs: list | None = None if first_scored is None else [None] * first_scored
        return UserRequest(
            request_id, text, list(token_ids), params, completions, prompt_logprobs, adapter=prepared.adapter
        )

    def _check_known(self, prepared: PreparedRequest, output_token_ids: Sequence[int]) -> None:
        """``ValueError``: an output cannot go on after these tokens."""
        if not output_token_ids:
            return
        if prepared.params.n > 1 or prepared.score_start is not None:
            raise ValueError(
                f"output_token_ids must be empty with n above 1 and for scores, given n={prepared.params.n}"
            )
        check_token_ids("output_token_ids", output_token_ids, self._model_config.vocab_size)
        most = prepared.max_num_tokens - len(prepared.prompt.token_ids) - 1
        if len(output_token_ids) > most:
            raise ValueError(f"output_token_ids must have at most {most} tokens, given {len(output_token_ids)}")
        if not prepared.stop_token_ids.isdisjoint(output_token_ids):
            raise ValueError("output_token_ids must have none that ends the output")

    def _adapter(self, lora_request: LoRARequest | None) -> HeldRequest | None:
        check_lora_request(lora_request)
        if lora_request is None:
            return None
        if isinstance(lora_request, HeldRequest):
            return lora_request
        return HeldRequest(lora_request.lora_name, lora_request.lora_path, self.host_adapters.get(lora_request))

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
        drafts = params.num_speculative_tokens
        if drafts is not None and drafts > self._num_draft_tokens:
            raise ValueError(
                f"num_speculative_tokens must be at most {self._num_draft_tokens}, which the engine's "
                f"speculative_config allows (without one: 0), given {drafts}"
            )
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
