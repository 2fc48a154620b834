"""HarmonyReader: what gpt-oss writes, which is messages on channels.

    <|channel|>analysis<|message|>...<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>     a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                      content

The recipient may also come before the channel. Commentary for nobody is content: it is meant for the user.
"""

import re
from collections.abc import Sequence

from compiled_llm.parsing.call_reader import Calls
from compiled_llm.parsing.formats import CALL_FORMATS, HARMONY, HARMONY_MARKS
from compiled_llm.parsing.source import Waiting
from compiled_llm.parsing.text_reader import GeneratorReader, Prose

_HEADERS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TOOL = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyReader(GeneratorReader):
    """Args:
    has_reasoning, has_calls: they are told from content.
    hidden: special tokens as text, which are not shown.
    """

    def __init__(self, has_reasoning: bool, has_calls: bool, hidden: Sequence[str] = ()) -> None:
        self._has_reasoning, self._has_calls = has_reasoning, has_calls
        self._hidden = tuple(text for text in hidden if text not in HARMONY_MARKS)
        super().__init__()

    def read(self) -> Waiting[None]:
        calls = Calls(self.events, CALL_FORMATS[HARMONY].make_id, self.source)
        # The prompt ends with "<|start|>assistant": its header goes on, or a text begins that has none.
        mark = yield from self.source.next(("to=", *_HEADERS))
        if mark is None:
            mark = yield from self._prose(self.content)
        while mark is not None:
            if mark in _ENDS:
                mark = yield from self._prose(self.content)
                continue
            header, message = yield from self.source.taken_until(("<|message|>",))
            if message is None:
                return  # the text ended amid the header
            mark = yield from self._message(mark + header, calls)

    def _message(self, header: str, calls: Calls) -> Waiting[str | None]:
        """Returns the mark that ends it."""
        tool = _TOOL.search(header)
        if tool is not None and self._has_calls:
            calls.begin(tool[1])
            yield from self.source.value(calls.arguments)
            calls.end()
            return (yield from self._prose(self.content))
        is_reasoning = "analysis" in header or (tool is None and "to=" in header)
        return (yield from self._prose(self.reasoning if is_reasoning and self._has_reasoning else self.content))

    def _prose(self, prose: Prose) -> Waiting[str | None]:
        marks = (*_HEADERS, *_ENDS, *self._hidden)
        while (mark := (yield from self.source.until(marks, prose.add))) in self._hidden:
            pass
        if mark is None:
            prose.finish()
        else:
            prose.mark()
        return mark
