"""Outputs of the engine -> OpenAI's answers: a whole one, or the chunks of a stream. Values of JSON.

Joined, the chunks of a stream are the whole answer: both are made of the same parts.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from compiled_llm.api.outputs import Logprob
from compiled_llm.openai.answers import (
    TextOffsets,
    TokenTexts,
    chat_delta,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    prompt_logprobs,
    usage,
)
from compiled_llm.server.answer_formats import AnswerReader
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import encode_json, event
from compiled_llm.server.messages import LogprobRow, Output, Piece
from compiled_llm.server.service import Served, ServedPrompt

_PREFIX = {"chat": "chatcmpl", "completion": "cmpl"}
_OBJECT = {"chat": "chat.completion", "completion": "text_completion"}
_MARK = "\0"  # stands for a text
_CHUNK = {"chat": "chat.completion.chunk", "completion": "text_completion"}


class OpenAIAnswer:
    """The answer to one request, part by part.

    Args:
        model: its name there.
        request_id: which the answer's id has in it.
        texts: of the model's tokens.
        echoed: the text of each prompt, if the answer is to have it.
    """

    def __init__(
        self, served: Served, model: str, request_id: str, texts: TokenTexts, echoed: Sequence[str] = ()
    ) -> None:
        self._asked, self._params, self._texts, self._plan = served.asked, served.params, texts, served.plan
        self._outputs = served.outputs
        self._kind = served.asked.kind
        self._id, self._created, self._model = f"{_PREFIX[self._kind]}-{request_id}", int(time.time()), model
        self._prompts = {
            prompt.request_id: _PromptAnswer(index, prompt, echoed[index] if echoed else None)
            for index, prompt in enumerate(served.prompts)
        }
        self._choices: dict[int, _Choice] = {}
        asked = served.asked
        has_more = asked.return_token_ids or asked.continuous_usage or asked.only_echo or self._plan is not None
        self._has_text_alone = not has_more and self._params.logprobs is None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._prompts.values())

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self._prompts.values())

    last_event = b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The chunk that ends a stream with an error."""
        return error.body()

    async def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices: list[dict[str, Any]] = []
        extras: dict[str, Any] = {}
        async for output in self._outputs:
            prompt = self._take(output)
            extras |= self._of_the_prompt(prompt, is_first=True) if self._kind == "chat" else {}
            if output.kv_transfer_params is not None:
                extras["kv_transfer_params"] = output.kv_transfer_params
            for piece in output.pieces:
                choices.append(self._choice(prompt, piece, "message"))
                await asyncio.sleep(0)  # many continuations with log-probabilities take seconds; others go on meanwhile
        choices.sort(key=lambda choice: choice["index"])
        return {**self._body(_OBJECT[self._kind], choices), **extras, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream. What is wrong with the request is raised before the first one."""
        async for output in self._outputs:
            for chunk in self.of_output(output):
                yield chunk
        if self._asked.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def of_output(self, output: Output) -> Iterator[dict[str, Any]]:
        """The chunks of one output."""
        prompt = self._take(output)
        for piece in output.pieces:
            index = self._index(prompt, piece)
            extras: dict[str, Any] = {}
            if self._kind == "chat":
                extras = self._of_the_prompt(prompt, is_first=not self._choices)
                if index not in self._choices:
                    role = {"role": "assistant", "content": ""}
                    yield self._chunk([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            choice = self._choice(prompt, piece, "delta")
            new = choice["text"] if "text" in choice else any(choice["delta"].values())
            says = new or piece.finish_reason or piece.logprobs
            if says or (piece.token_ids and self._asked.return_token_ids):
                yield {**self._chunk([choice]), **extras}

    def events_of(self, output: Output) -> bytes:
        """The events of an output that is neither the first nor the last one of its request."""
        if self._has_text_alone and len(output.pieces) == 1:
            (piece,) = output.pieces
            choice = self._choices.get(self._index(self._prompts[output.request_id], piece))
            if choice is not None and piece.text:
                return self._event_of_text(output, piece, choice)
        return b"".join(map(event, self.of_output(output)))

    def _event_of_text(self, output: Output, piece: Piece, choice: "_Choice") -> bytes:
        """The same bytes as by ``of_output``: what stands around the text of a choice is made once."""
        if choice.around_text is None:
            (chunk,) = self.of_output(
                Output(output.request_id, [Piece(piece.index, _MARK, [])], output.num_cached_tokens)
            )
            head, _, tail = event(chunk).rpartition(encode_json(_MARK))
            choice.around_text = head, tail
        choice.num_tokens += len(piece.token_ids)
        head, tail = choice.around_text
        return head + encode_json(piece.text) + tail

    # -- Parts

    def _take(self, output: Output) -> "_PromptAnswer":
        prompt = self._prompts[output.request_id]
        prompt.num_cached_tokens = output.num_cached_tokens
        if self._asked.only_echo:
            output.pieces = [
                Piece(piece.index, "", [], None if piece.logprobs is None else [], "length") for piece in output.pieces
            ]
        if output.prompt_logprobs is not None:
            prompt.logprobs = [None if row is None else found_logprobs(row) for row in output.prompt_logprobs]
        return prompt

    def _index(self, prompt: "_PromptAnswer", piece: Piece) -> int:
        return prompt.index * self._params.n + piece.index

    def _choice(self, prompt: "_PromptAnswer", piece: Piece, whole_or_delta: str) -> dict[str, Any]:
        index = self._index(prompt, piece)
        is_first = index not in self._choices
        if is_first:
            self._choices[index] = _Choice(AnswerReader(self._plan))
        state, finish_reason = self._choices[index], piece.finish_reason
        state.num_tokens += len(piece.token_ids)
        choice: dict[str, Any] = {"index": index}
        if self._kind == "chat":
            events = state.reader.read(piece)
            choice[whole_or_delta] = chat_message(events) if whole_or_delta == "message" else chat_delta(events)
            if finish_reason == "stop" and state.reader.has_calls and self._asked.tool_use.choice != "named":
                finish_reason = "tool_calls"
            choice["logprobs"] = self._chat_logprobs(piece)
        else:
            echoed = prompt.echoed if is_first and prompt.echoed is not None else ""
            choice["text"] = echoed + piece.text
            state.num_characters += len(choice["text"])
            choice["logprobs"] = self._completion_logprobs(prompt, state, piece, is_first)
            choice |= self._of_the_prompt(prompt, is_first)
        if self._asked.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return {**choice, "finish_reason": finish_reason, "stop_reason": piece.stop_reason}

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        rows = [found_logprobs(row) for row in piece.logprobs]
        return chat_logprobs(piece.token_ids, rows, self._params.logprobs or 0, self._texts)

    def _completion_logprobs(
        self, prompt: "_PromptAnswer", state: "_Choice", piece: Piece, is_first: bool
    ) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        token_ids, rows = piece.token_ids, [found_logprobs(row) for row in piece.logprobs]
        is_echoed = prompt.echoed is not None
        if is_first:
            before = () if is_echoed else prompt.token_ids
            state.offsets = self._texts.offsets(before, self._params.skip_special_tokens)
            if is_echoed:
                token_ids = [*prompt.token_ids, *token_ids]
                rows = [*(prompt.logprobs or [None] * len(prompt.token_ids)), *rows]  # type: ignore[list-item]
        assert state.offsets is not None
        found = completion_logprobs(token_ids, rows, state.offsets, self._texts)
        # A stop string is cut off, and a part of a character is not there yet.
        found["text_offset"] = [min(offset, state.num_characters) for offset in found["text_offset"]]
        return found

    def _of_the_prompt(self, prompt: "_PromptAnswer", is_first: bool) -> dict[str, Any]:
        """What an answer has of its prompt, once. An echoed one has its log-probabilities beside the others."""
        found: dict[str, Any] = {}
        if is_first and not self._asked.echo:
            found |= prompt_logprobs(prompt.logprobs)
        if is_first and self._asked.return_token_ids:
            found["prompt_token_ids"] = prompt.token_ids
        return found

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._body(_CHUNK[self._kind], choices)
        if self._asked.include_usage:
            chunk["usage"] = self._usage() if self._asked.continuous_usage else None
        return chunk

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        counts = [choice.reader.num_reasoning_tokens for choice in self._choices.values()]
        known = [count for count in counts if count is not None]
        num_reasoning_tokens = sum(known) if known else None
        return usage(self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens, num_reasoning_tokens)


class _PromptAnswer:
    """One prompt of a request.

    Attributes:
        index: among the prompts.
        echoed: its text, if the answer begins with it.
        logprobs: of its tokens, if they were asked for and are known.
    """

    def __init__(self, index: int, prompt: ServedPrompt, echoed: str | None) -> None:
        self.index, self.token_ids, self.echoed = index, prompt.token_ids, echoed
        self.logprobs: list[Mapping[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0


class _Choice:
    """One continuation, as far as it is known.

    Attributes:
        offsets: of its tokens, where they have log-probabilities.
        around_text: bytes of an event before and after its text, where nothing else changes; None: not known yet.
    """

    around_text: tuple[bytes, bytes] | None = None

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.num_tokens = self.num_characters = 0
        self.offsets: TextOffsets | None = None


def found_logprobs(row: LogprobRow) -> dict[int, Logprob]:
    """The log-probabilities of one place, by token id."""
    return {token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in row}
