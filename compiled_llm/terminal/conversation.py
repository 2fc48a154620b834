"""Conversation: messages, how they become a prompt, and the answers of an engine to them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.terminal.answer import Answer
from compiled_llm.text.prompts import EncodedPrompt

# Of a model without a chat template. The empty line and the name of the other speaker end an answer.
_NAMES = {"user": "User", "assistant": "Assistant"}
_END_OF_TURN = "\n\nUser:"


class Conversation:
    """Messages so far, and what the model answers to them. Each prompt begins with the one before it and its answer.

    So the prefix cache holds the keys and values of all but the last message. A model without a chat template gets the
    messages as text: a line with the speaker's name, what was said, and an empty line.

    Args:
        engine: has a tokenizer.
        sampling: arguments of ``SamplingParams`` for each answer; ``max_tokens`` None: until the context is full.
        write: gets each piece of an answer as it comes.

    Attributes:
        system: the system message; None: there is none.
        messages: dicts with "role" ("user" or "assistant") and "content", in turns.
        last: the last answer.
    """

    def __init__(
        self,
        engine: CompiledEngine,
        sampling: dict[str, Any],
        write: Callable[[str], object],
        system: str | None = None,
    ) -> None:
        assert engine.tokenizer is not None
        self.engine, self.sampling, self.system = engine, sampling, system
        self.has_template = "default" in engine.tokenizer.chat_templates
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None
        self._write = write
        self._params(1)  # what is wrong with the arguments is told now

    @property
    def capacity(self) -> int:
        """Most tokens that the conversation may have."""
        return self.engine.scheduler.request_capacity

    def say(self, text: str) -> str | None:
        """Add a message of the user and print the answer. Returns what there is to say about its end, or None.

        Raises:
            ValueError: the answer has no room, or cannot be served otherwise. The message is not kept.
        """
        self.messages.append({"role": "user", "content": text})
        return self._answer(kept=len(self.messages) - 1)

    def retry(self) -> str | None:
        """Answer the user's last message again.

        Raises:
            ValueError: there is none.
        """
        if not self.messages:
            raise ValueError("there is no message to answer again")
        before = list(self.messages)
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        try:
            return self._answer(kept=len(self.messages))
        except (ValueError, KeyboardInterrupt):
            self.messages = before
            raise

    def set(self, name: str, value: Any) -> None:
        """Change a sampling parameter of the answers to come. ``ValueError``: it is not allowed; nothing changes."""
        before = self.sampling
        self.sampling = {**before, name: value}
        try:
            self._params(1)
        except ValueError:
            self.sampling = before
            raise

    def save(self, path: Path) -> None:
        """Write the messages as a row that ``compiled-llm batch`` serves. ``OSError``, also where the file is there."""
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self._all_messages()}, ensure_ascii=False) + "\n")

    def num_tokens(self) -> int:
        """Tokens of the conversation, as the next prompt would have them."""
        return len(self._prompt().token_ids) if self.messages else 0

    def _answer(self, kept: int) -> str | None:
        """Print the answer to ``messages`` and add it to them. Where that fails, ``kept`` messages stay."""
        try:
            prompt = self._prompt()
            room = self.capacity - len(prompt.token_ids)
            if room < 1:
                raise ValueError(self._is_full(len(prompt.token_ids)))
            params = self._params(room)
            stream = self.engine.stream(prompt, params)
        except (ValueError, KeyboardInterrupt):
            del self.messages[kept:]
            raise
        self.last = answer = Answer(self._write)
        try:
            for output in stream:
                answer.take(output)
        except KeyboardInterrupt as interrupt:
            self.messages.append({"role": "assistant", "content": answer.texts[0]})
            stream.close()
            answer.end_line()
            if interrupt.args:  # not Ctrl-C, but a signal that ends the program
                raise
            return "stopped; what came of the answer stays in the conversation, /retry asks again"
        if answer.error is not None:
            del self.messages[kept:]
            raise ValueError(answer.error)
        self.messages.append({"role": "assistant", "content": answer.texts[0]})
        if answer.ends[0][0] != "length":
            return None
        if params.max_tokens == room:
            return self._is_full(self.capacity)
        return f"cut at max_tokens={params.max_tokens}: /set max_tokens {2 * (params.max_tokens or 1)}, then /retry"

    def _is_full(self, given: int) -> str:
        return (
            f"the conversation has {given} tokens, and all the model's context holds is {self.capacity}: /clear begins "
            "anew, /save FILE keeps what was said"
        )

    def _params(self, room: int) -> SamplingParams:
        asked = self.sampling.get("max_tokens")
        stop = SamplingParams(stop=self.sampling.get("stop")).stop or ()
        ends = (*stop, *([] if self.has_template else [_END_OF_TURN]))
        SamplingParams(**self.sampling)  # with max_tokens as it was given
        more = {"max_tokens": room if asked is None else min(asked, room), "stop": ends, "output_kind": "delta"}
        least = {"min_tokens": min(self.sampling.get("min_tokens", 0), more["max_tokens"])}
        return SamplingParams(**{**self.sampling, **more, **least})

    def _all_messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

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
