"""ServerConversation: the answers of a server with OpenAI's interface to messages."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from compiled_llm.api.outputs import RequestMetrics
from compiled_llm.terminal.answer import Answer
from compiled_llm.terminal.conversation import Conversation, cut_at
from compiled_llm.terminal.server_client import ServerClient


class ServerConversation(Conversation):
    """One with a model of a server, which makes the prompt.

    Args:
        model: the server's name of it; None: the first that it names.
    """

    def __init__(
        self,
        client: ServerClient,
        model: str | None,
        sampling: dict[str, Any],
        write: Callable[[str], object],
        system: str | None = None,
    ) -> None:
        models = {card["id"]: card for card in client.models()}
        if not models or (model is not None and model not in models):
            raise ValueError(
                f"MODEL must be one that {client.url} serves, {', '.join(models) or 'none'}, given {model}"
            )
        self._client, self._model = client, next(iter(models)) if model is None else model
        self._capacity = models[self._model].get("max_model_len")  # not every server says it
        super().__init__(sampling, write, system)

    def size(self) -> str:
        last = self.last
        if last is not None and self.messages and not last.num_tokens:
            return "of an unknown number of tokens"
        tokens = 0 if last is None or not self.messages else last.num_prompt_tokens + last.num_tokens
        return f"{tokens} tokens" if self._capacity is None else f"{tokens} of {self._capacity} tokens"

    def facts(self) -> dict[str, str]:
        return {"server": self._client.url, "model": self._model}

    def _begin(self) -> tuple[Answer, Any]:
        body = {"model": self._model, "messages": self._all_messages(), **self.sampling}
        body["stream_options"] = {"include_usage": True}
        return _ServerAnswer(self._write), self._client.stream("/v1/chat/completions", body)

    def _cut(self) -> str:
        max_tokens = self.sampling.get("max_tokens")
        if self.last is not None and self.last.num_tokens == max_tokens:
            return cut_at(max_tokens)
        return "the model's context is full: /clear begins anew, /save FILE keeps what was said"


class _ServerAnswer(Answer):
    """One that comes as events. What the model thinks before it speaks is printed and not kept."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(write)
        self._metrics, self._content = RequestMetrics(time.monotonic()), ""

    @property
    def summary(self) -> str:
        return super().summary if self.num_tokens else "stopped before the server had counted its tokens"

    @property
    def said(self) -> str:
        return self._content

    def take(self, output: Mapping[str, Any]) -> None:  # type: ignore[override]
        assert self._metrics is not None
        self._last_time = time.monotonic()
        if usage := output.get("usage"):
            self.num_prompt_tokens, self.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in output.get("choices", ()):
            delta = choice.get("delta") or {}
            content = delta.get("content") or ""
            text = (delta.get("reasoning") or delta.get("reasoning_content") or "") + content
            if text and self._metrics.first_token_time is None:
                self._metrics = dataclasses.replace(self._metrics, first_token_time=self._last_time)
            self.texts[0] += text
            self._content += content
            if choice.get("finish_reason") is not None:
                self.ends[0] = choice["finish_reason"], choice.get("stop_reason")
        self._print()
