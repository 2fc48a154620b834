"""EngineConversation: how messages become a prompt, and the answers of an engine to it."""

from collections.abc import Callable
from typing import Any

from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.terminal.answer import Answer
from compiled_llm.terminal.conversation import Conversation, cut_at
from compiled_llm.text.prompts import EncodedPrompt

# Of a model without a chat template. The empty line and the name of the other speaker end an answer.
_NAMES = {"user": "User", "assistant": "Assistant"}
_END_OF_TURN = "\n\nUser:"


class EngineConversation(Conversation):
    """One with an engine. Each prompt begins with the one before it and its answer.

    So the prefix cache holds the keys and values of all but the last message. A model without a chat template gets the
    messages as text: a line with the speaker's name, what was said, and an empty line.

    Args:
        engine: has a tokenizer.
        lora_request: an adapter; None: the model as it is.
    """

    def __init__(
        self,
        engine: CompiledEngine,
        sampling: dict[str, Any],
        write: Callable[[str], object],
        system: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        assert engine.tokenizer is not None
        self.engine, self._lora_request = engine, lora_request
        self.has_template = "default" in engine.tokenizer.chat_templates
        super().__init__(sampling, write, system)

    @property
    def capacity(self) -> int:
        """Most tokens that the conversation may have."""
        return self.engine.scheduler.request_capacity

    def num_tokens(self) -> int:
        """Tokens of the conversation, as the next prompt would have them."""
        return len(self._prompt().token_ids) if self.messages else 0

    def size(self) -> str:
        return f"{self.num_tokens()} of {self.capacity} tokens"

    def facts(self) -> dict[str, str]:
        return self.engine.stats().rows()

    def notes(self) -> list[str]:
        return self.engine.compile_report().change_overs()

    def _begin(self) -> tuple[Answer, Any]:
        prompt = self._prompt()
        room = self.capacity - len(prompt.token_ids)
        if room < 1:
            raise ValueError(self._is_full(len(prompt.token_ids)))
        self._max_tokens, self._room = (params := self._params(room)).max_tokens, room
        return Answer(self._write), self.engine.stream(prompt, params, lora_request=self._lora_request)

    def _cut(self) -> str:
        return self._is_full(self.capacity) if self._max_tokens == self._room else cut_at(self._max_tokens or 1)

    def _is_full(self, given: int) -> str:
        return (
            f"the conversation has {given} tokens, and all the model's context holds is {self.capacity}: /clear begins "
            "anew, /save FILE keeps what was said"
        )

    def _check_sampling(self) -> None:
        self._params(1)

    def _params(self, room: int) -> SamplingParams:
        asked = self.sampling.get("max_tokens")
        stop = SamplingParams(stop=self.sampling.get("stop")).stop or ()
        ends = (*stop, *([] if self.has_template else [_END_OF_TURN]))
        SamplingParams(**self.sampling)  # with max_tokens as it was given
        more = {"max_tokens": room if asked is None else min(asked, room), "stop": ends, "output_kind": "delta"}
        least = {"min_tokens": min(self.sampling.get("min_tokens", 0), more["max_tokens"])}
        return SamplingParams(**{**self.sampling, **more, **least})

    def _prompt(self) -> EncodedPrompt:
        if self.has_template:
            return self.engine.encode_chat(self._all_messages())
        system = "" if self.system is None else f"{self.system}\n\n"
        turns = (f"{_NAMES[message['role']]}:\n{message['content'].rstrip()}\n\n" for message in self.messages)
        text = f"{system}{''.join(turns)}Assistant:\n"
        assert self.engine.tokenizer is not None
        if excess := self.engine.tokenizer.excess(text, self.capacity):
            raise ValueError(self._is_full(excess[0]))
        return EncodedPrompt(text, self.engine.tokenizer.encode(text, split_special_tokens=True))
