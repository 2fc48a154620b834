"""Conversation: messages, and the answers to them."""

import abc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.terminal.answer import Answer


class Conversation(abc.ABC):
    """Messages so far, and what a model answers to them.

    Args:
        sampling: arguments of ``SamplingParams`` for each answer; ``max_tokens`` None: until the context is full.
        write: gets each piece of an answer as it comes.

    Attributes:
        system: the system message; None: there is none.
        messages: dicts with "role" ("user" or "assistant") and "content", in turns.
        last: the last answer.
    """

    def __init__(self, sampling: dict[str, Any], write: Callable[[str], object], system: str | None = None) -> None:
        self.sampling, self.system = sampling, system
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None
        self._write = write
        self._check_sampling()  # what is wrong with the arguments is told now

    @abc.abstractmethod
    def size(self) -> str:
        """The tokens of the conversation, and how many it may have."""

    @abc.abstractmethod
    def facts(self) -> dict[str, str]:
        """What answers the conversation, in rows of name and value."""

    def notes(self) -> list[str]:
        """What there is to say besides, a line each."""
        return []

    @abc.abstractmethod
    def _begin(self) -> tuple[Answer, Any]:
        """An answer to the messages that has nothing yet, and an iterator over what it takes, with ``close``.

        Raises:
            ValueError: the messages cannot be answered.
        """

    @abc.abstractmethod
    def _cut(self) -> str | None:
        """What to say of the last answer, which ended as it had all the tokens that it may have."""

    def _check_sampling(self) -> None:
        SamplingParams(**self.sampling)

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
            self._check_sampling()
        except ValueError:
            self.sampling = before
            raise

    def save(self, path: Path) -> None:
        """Write the messages as a row that ``compiled-llm batch`` serves. ``OSError``, also where the file is there."""
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self._all_messages()}, ensure_ascii=False) + "\n")

    def _answer(self, kept: int) -> str | None:
        """Print the answer to ``messages`` and add it to them. Where that fails, ``kept`` messages stay."""
        try:
            answer, stream = self._begin()
        except (ValueError, KeyboardInterrupt):
            del self.messages[kept:]
            raise
        self.last = answer
        try:
            for output in stream:
                answer.take(output)
        except (ValueError, OSError) as error:  # of a server
            del self.messages[kept:]
            if answer.texts[0] and not isinstance(error, BrokenPipeError):
                answer.end_line()
            raise
        except KeyboardInterrupt as interrupt:
            self.messages.append({"role": "assistant", "content": answer.said})
            stream.close()
            answer.end_line()
            if interrupt.args:  # not Ctrl-C, but a signal that ends the program
                raise
            return "stopped; what came of the answer stays in the conversation, /retry asks again"
        if answer.error is not None:
            del self.messages[kept:]
            raise ValueError(answer.error)
        self.messages.append({"role": "assistant", "content": answer.said})
        return self._cut() if answer.ends.get(0, ("",))[0] == "length" else None

    def _all_messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]


def cut_at(max_tokens: int) -> str:
    return f"cut at max_tokens={max_tokens}: /set max_tokens {2 * max_tokens}, then /retry"
