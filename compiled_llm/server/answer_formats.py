"""How the model that is served writes reasoning and tool calls: what a request needs for that, and its answer read."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.openai.tools import ToolUse
from compiled_llm.parsing.events import CallBegins, ContentDelta, Event, Reader
from compiled_llm.parsing.formats import AUTO, CALL_FORMATS, NONE, REASONING_FORMATS, ReasoningFormat, format_of
from compiled_llm.parsing.grammar import answer_grammar
from compiled_llm.parsing.readers import make_reader
from compiled_llm.server.messages import Piece
from compiled_llm.text.tokenizer import Tokenizer

_JSON_FORMS = {"json", "json_object"}  # structured outputs that may come after reasoning, or instead of calls


class ReasoningIds(NamedTuple):
    """The tokens between which reasoning is. ``is_begun``: by the prompt."""

    begin: int
    end: int
    is_begun: bool


class AnswerPlan(NamedTuple):
    """How one request's answer is made and read.

    Attributes:
        sampling: parameters that it needs besides its own.
        make_reader: of each continuation.
        reasoning_ids: None: which tokens are reasoning is not known.
    """

    sampling: Mapping[str, Any]
    make_reader: Callable[[], Reader]
    reasoning_ids: ReasoningIds | None


class AnswerReader:
    """Reads one continuation.

    Args:
        plan: None: all is content.

    Attributes:
        has_calls: so far.
        num_reasoning_tokens: with their marks; None: not known.
    """

    def __init__(self, plan: AnswerPlan | None) -> None:
        self._reader = None if plan is None else plan.make_reader()
        self._ids = None if plan is None else plan.reasoning_ids
        self._is_reasoning: bool | None = None  # None: that depends on the first token
        self.has_calls = False
        self.num_reasoning_tokens = None if self._ids is None else 0

    def read(self, piece: Piece) -> list[Event]:
        """What is new of it."""
        self._count(piece.token_ids)
        if self._reader is None:
            return [ContentDelta(piece.text)] if piece.text else []
        events = self._reader.feed(piece.text)
        if piece.finish_reason is not None:
            events += self._reader.finish()
        self.has_calls |= any(isinstance(event, CallBegins) for event in events)
        return events

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._ids is None or not token_ids or self._is_reasoning is False:
            return
        if self._is_reasoning is None and not (self._ids.is_begun or token_ids[0] == self._ids.begin):
            self._is_reasoning = False
            return
        self._is_reasoning = self._ids.end not in token_ids
        assert self.num_reasoning_tokens is not None
        count = len(token_ids) if self._is_reasoning else token_ids.index(self._ids.end) + 1
        self.num_reasoning_tokens += count


class AnswerFormats:
    """The formats of one model.

    Args:
        calls, reasoning: names of formats; "auto": those that the chat template tells of; "none".
        tokenizer: None: the model has none.
    """

    def __init__(self, calls: str, reasoning: str, tokenizer: Tokenizer | None) -> None:
        templates = tokenizer.chat_templates.values() if tokenizer is not None else ()
        self._calls = format_of(templates, CALL_FORMATS) if calls == AUTO else calls
        self._reasoning = format_of(templates, REASONING_FORMATS) if reasoning == AUTO else reasoning
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens if tokenizer is not None else {}
        self._special_tokens = {text: token.token_id for text, token in special.items()}

    def __str__(self) -> str:
        return f"tool calls: {self._calls}; reasoning: {self._reasoning}"

    def plan(self, asked: OpenAIRequest, prompt: str) -> AnswerPlan | None:
        """For a chat whose prompt is ``prompt``; None: its answer is content and nothing else.

        Raises:
            ValueError: the model has no format of calls, or the request wants another form of output besides.
        """
        tools, reasoning = asked.tool_use.tools, self._reasoning
        if tools and self._calls == NONE:
            raise ValueError(
                "tools are not served by this model: its chat template tells no format of calls that is known; start "
                "the server with --tool-call-parser, or leave them out"
            )
        form = asked.sampling.get("structured_outputs")
        if form is not None and not form.keys() <= _JSON_FORMS:
            if tools:
                raise ValueError(
                    "tools cannot go with structured_outputs other than json: leave one of them out, or give "
                    "tool_choice 'none'"
                )
            reasoning = NONE  # the form is of the whole output
        own, end = REASONING_FORMATS.get(reasoning), prompt.rstrip()
        if own is not None and end.endswith(own.ends):
            own, reasoning = None, NONE  # the prompt has ended it
        calls = self._calls if tools else NONE
        if (calls, reasoning) == (NONE, NONE):
            return None
        begun = own is not None and end.endswith(own.begins)
        marks = {mark for known in (own, CALL_FORMATS.get(calls)) if known is not None for mark in known.marks}
        special = {mark: self._special_tokens[mark] for mark in marks if mark in self._special_tokens}
        sampling: dict[str, Any] = {}
        hidden: list[str] = []
        if special:
            sampling["skip_special_tokens"] = False
            if asked.sampling.get("skip_special_tokens", True):
                hidden = [text for text in self._special_tokens if text not in marks]
        grammar = _grammar(asked.tool_use, _schema(form), special, (reasoning, calls), begun)
        if grammar is not None:
            sampling["structured_outputs"] = {"grammar": grammar}
        return AnswerPlan(
            sampling,
            lambda: make_reader(reasoning, calls, tools, hidden, begun),
            None if own is None else self._reasoning_ids(own, begun),
        )

    def _reasoning_ids(self, known: ReasoningFormat, is_begun: bool) -> ReasoningIds | None:
        """None: a mark is no token of its own, as where reasoning is one of several messages."""
        assert self._tokenizer is not None
        found = [self._tokenizer.encode_piece(marks[0]) for marks in (known.begins[:1], known.ends[:1]) if marks]
        if [len(ids) for ids in found] != [1, 1]:
            return None
        return ReasoningIds(found[0][0], found[1][0], is_begun)


def _grammar(
    use: ToolUse,
    schema: Mapping[str, Any] | None,
    special_tokens: Mapping[str, int],
    formats: tuple[str, str],
    is_reasoning: bool,
) -> str | None:
    """None: the answer may be any text, and calls need not be of their schemas."""
    must_call = use.choice != "auto"
    is_checked = must_call or any(tool.strict for tool in use.tools) or not use.parallel
    if schema is None and not (use.tools and is_checked):
        return None
    grammar = answer_grammar(
        *formats,
        special_tokens,
        tools=use.tools,
        must_call=must_call,
        several=use.parallel,
        schema=schema,
        is_reasoning=is_reasoning,
    )
    try:
        StructuredOutputsParams(grammar=grammar)
    except ValueError as error:
        raise ValueError(f"tools, or the schema of the output, cannot be enforced: {error}") from error
    return grammar


def _schema(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if form is None or not form.keys() <= _JSON_FORMS:
        return None
    if "json" not in form:
        return {"type": "object"}
    return json.loads(form["json"]) if isinstance(form["json"], str) else form["json"]
