"""TextReader: a model's text -> reasoning, content and tool calls, in the formats of a table."""

from collections.abc import Collection, Sequence

from compiled_llm.parsing.call_reader import CallReader
from compiled_llm.parsing.events import ContentDelta, Event, ReasoningDelta, Tool
from compiled_llm.parsing.formats import CallFormat, ReasoningFormat
from compiled_llm.parsing.source import TextSource, Waiting


class Prose:
    """Reasoning or content: the text between marks, without the lines that only set it off from them.

    White space before a mark is shown only if more of the same comes after it, and line ends after a mark never.
    """

    def __init__(self, kind: type[ReasoningDelta] | type[ContentDelta], events: list[Event]) -> None:
        self._kind, self._events = kind, events
        self._held = ""
        self._follows_mark = False

    def add(self, text: str) -> None:
        if self._follows_mark:
            text = text.lstrip("\r\n")
            self._follows_mark = not text
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._events.append(self._kind(shown))

    def mark(self) -> None:
        """A mark comes here."""
        self._follows_mark = True

    def finish(self) -> None:
        """The text has ended here."""
        if self._held and not self._follows_mark:
            self._events.append(self._kind(self._held))


class GeneratorReader:
    """A ``Reader`` that is a generator, which waits whenever it needs more text."""

    def __init__(self) -> None:
        self.source = TextSource()
        self.events: list[Event] = []
        self.reasoning, self.content = Prose(ReasoningDelta, self.events), Prose(ContentDelta, self.events)
        self._reading = self.read()
        self._go_on()

    def read(self) -> Waiting[None]:
        """The whole text."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        self.source.rest += text
        return self._go_on()

    def finish(self) -> list[Event]:
        self.source.has_ended = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._reading, None)
        found = self.events[:]
        self.events.clear()
        return found


class TextReader(GeneratorReader):
    """Reads a text whose reasoning, if any, comes first.

    Args:
        reasoning: None: it is not told from content.
        calls: None: they are not told from content.
        tools: that may be called.
        hidden: special tokens as text, which are not shown.
        is_reasoning: the prompt has begun the reasoning already.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        tools: Collection[Tool] = (),
        hidden: Sequence[str] = (),
        is_reasoning: bool = False,
    ) -> None:
        self._reasoning_format, self._call_format, self._tools = reasoning, calls, tools
        self._hidden, self._starts_in_reasoning = tuple(hidden), is_reasoning
        super().__init__()

    def read(self) -> Waiting[None]:
        known = self._reasoning_format
        if known is not None:
            begun = yield from self.source.next(known.begins)  # some models repeat what the prompt ended with
            if begun or self._starts_in_reasoning:
                yield from self._reasoning(known)
        if self._call_format is None:
            yield from self._content_alone()
        else:
            yield from self._content_and_calls(self._call_format)

    def _reasoning(self, known: ReasoningFormat) -> Waiting[None]:
        self.reasoning.mark()
        marks = (*known.ends, *self._hidden)
        while (mark := (yield from self.source.until(marks, self.reasoning.add))) in self._hidden:
            pass
        if mark is None:
            self.reasoning.finish()
        self.content.mark()

    def _content_alone(self) -> Waiting[None]:
        while (yield from self.source.until(self._hidden, self.content.add)) is not None:
            pass
        self.content.finish()

    def _content_and_calls(self, known: CallFormat) -> Waiting[None]:
        calls = CallReader(known, self._tools, self.source, self.events)
        mark: str | None = ""
        may_be_bare = known.bare
        passed = (*known.around, *self._hidden)
        while mark is not None:
            if mark in known.begins or (not mark and may_be_bare):
                is_call = yield from calls.read(mark)
                if is_call:
                    self.content.mark()
                else:
                    self.content.add(self.source.kept())
            elif mark in known.around:
                self.content.mark()
            mark = yield from self.source.until((*known.begins, *passed), self.content.add)
        self.content.finish()
