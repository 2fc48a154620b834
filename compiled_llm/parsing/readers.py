"""The reader of a text, for the names of its formats."""

from collections.abc import Collection, Sequence

from compiled_llm.parsing.events import Reader, Tool
from compiled_llm.parsing.formats import CALL_FORMATS, HARMONY, REASONING_FORMATS
from compiled_llm.parsing.harmony_reader import HarmonyReader
from compiled_llm.parsing.text_reader import TextReader


def make_reader(
    reasoning: str, calls: str, tools: Collection[Tool] = (), hidden: Sequence[str] = (), is_reasoning: bool = False
) -> Reader:
    """A reader of one text.

    Args:
        reasoning, calls: names of formats; "none": it is not told from content.
        tools: that may be called.
        hidden: special tokens as text, which are not shown.
        is_reasoning: the prompt has begun the reasoning already.
    """
    if HARMONY in (reasoning, calls):
        return HarmonyReader(reasoning == HARMONY, calls == HARMONY, hidden)
    own = CALL_FORMATS.get(calls)
    return TextReader(REASONING_FORMATS.get(reasoning), own, tools, hidden, is_reasoning)
