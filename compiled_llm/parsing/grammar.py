"""Grammars, in llguidance's variant of Lark, of answers that must be tool calls of given schemas or JSON.

Special tokens among the marks stand as tokens there; free text never has such.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compiled_llm.parsing.events import Tool
from compiled_llm.parsing.formats import CALL_FORMATS, HARMONY, REASONING_FORMATS, CallFormat
from compiled_llm.parsing.values import dumps, is_plain_text

_HEAD = "TEXT: /(.|\\n)*/\n"
_NO_CALL = r"/([^\s{\[](.|\n)*)?/"  # a text that does not begin as calls without a mark do
# JSON's white space, but never endlessly: models like to go on with spaces.
_WHITESPACE = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}}


def answer_grammar(
    reasoning: str,
    calls: str,
    special_tokens: Mapping[str, int],
    *,
    tools: Sequence[Tool] = (),
    must_call: bool = False,
    several: bool = True,
    schema: Mapping[str, Any] | None = None,
    is_reasoning: bool = False,
) -> str:
    """The grammar of an answer: reasoning if the model likes, then calls, or content.

    Args:
        reasoning, calls: names of formats, or "none".
        special_tokens: id of each by its text.
        tools: that may be called, with arguments of their schema; in free text only ``strict`` ones have to be.
        must_call: there is no content.
        several: more than one call is allowed.
        schema: of the content, which is JSON; None: it is any text.
        is_reasoning: the prompt has begun the reasoning already.
    """
    grammar = _Grammar(special_tokens)
    content = None if must_call else "TEXT" if schema is None else _json(schema)
    known = CALL_FORMATS[calls] if tools else None
    if known is not None:
        is_free = content == "TEXT"
        grammar.add("call", " | ".join(grammar.call(known, tool, tool.strict or not is_free) for tool in tools))
    if HARMONY in (reasoning, calls):
        grammar.add_harmony(known, content)
    else:
        grammar.add("start", f"{grammar.reasoning(reasoning, is_reasoning)} answer".strip())
        grammar.add("answer", " | ".join(grammar.answers(known, several, content)))
    return grammar.text


class _Grammar:
    """Attributes:
    text: its rules so far.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split
        self.text = _HEAD
        self._count = 0

    def add(self, name: str, body: str) -> str:
        self.text += f"{name}: {body}\n"
        return name

    def until(self, mark: str) -> str:
        """Free text, and the mark that ends it."""
        if mark in self._special:
            return f"TEXT {self.quoted(mark)}"
        self._count += 1
        name = f"until_{self._count}"
        self.add(f"{name}[lazy]", f"TEXT {self.quoted(mark)}")
        return name

    def quoted(self, text: str) -> str:
        """A text that stands as it is, with its special tokens as such; "" for none."""
        pieces = filter(None, self._split(text))
        return " ".join(f"<[{self._special[one]}]>" if one in self._special else dumps(one) for one in pieces)

    # -- Reasoning

    def reasoning(self, name: str, is_begun: bool) -> str:
        """A rule for it, if any may come."""
        if name == "none":
            return ""
        known = REASONING_FORMATS[name]
        rest = f"{self.until(known.ends[0])} /[ \\n]{{0,4}}/"
        self.add("reasoning", rest if is_begun else f"{self.quoted(known.begins[0])} {rest}")
        return "reasoning" if is_begun else "reasoning?"

    # -- Calls

    def answers(self, known: CallFormat | None, several: bool, content: str | None) -> Iterator[str]:
        """The alternatives after the reasoning."""
        if known is not None:
            opening, between, end = known.joined
            opening, between = opening + known.written[0], between + known.written[0]
            others = f" ({self.quoted(between)} call)*" * several
            rest = f"call{others} {self.quoted(end)}"
            mark = next((mark for mark in (*known.around, *known.begins) if opening.startswith(mark)), None)
            if content == "TEXT" and mark is not None:
                yield f"{self.until(mark)} {self.quoted(opening.removeprefix(mark))} {rest}"
            else:
                yield f"{self.quoted(opening)} {rest}"
                content = _NO_CALL if content == "TEXT" else content
        if content is not None:
            yield content

    def add_harmony(self, known: CallFormat | None, content: str | None) -> None:
        """Reasoning and remarks, then one call or the content; what ends these is the end of the text."""
        channel, message, start = (self.quoted(f"<|{name}|>") for name in ("channel", "message", "start"))
        self.add(
            "message", f'{channel} ("analysis" | "commentary") {message} {self.until("<|end|>")} {start} "assistant"'
        )
        answers = [f"{self.quoted(known.written[0])} call"] if known is not None else []
        answers += [f'{channel} "final" {message} {content}'] if content is not None else []
        self.add("start", f"message* ({' | '.join(answers)})")

    def call(self, known: CallFormat, tool: Tool, is_enforced: bool) -> str:
        """A rule for a call of ``tool``, from its name on."""
        _, after_name, end = known.written
        schema = {"type": "object", **(tool.parameters if is_enforced else {})}
        if known.layout == "tagged":
            arguments = self._tagged_arguments(known, schema)
        elif known.layout == "python":
            arguments = self._python_arguments(schema)
        else:
            arguments = _json(schema)
        end = "" if known is CALL_FORMATS[HARMONY] else end  # there it ends the text
        return self._rule(f"{self.quoted(tool.name + after_name)} {arguments} {self.quoted(end)}")

    def _tagged_arguments(self, known: CallFormat, schema: Mapping[str, Any]) -> str:
        before_key, after_key, before_value, after_value = known.tags
        found = []
        for key, own, is_required in _properties(schema):
            if is_plain_text(own):
                value = self._plain_text(own, after_value)
            else:
                value = f"{_json(own)} {self.quoted(after_value)}"
            head = self.quoted(before_key + key + after_key + before_value)
            found.append(self._rule(f'{head} {value} "\\n"') + "?" * (not is_required))
        return " ".join(found)

    def _plain_text(self, schema: Mapping[str, Any], end: str) -> str:
        """One of those that the schema lists, or any: what else it says of a string is not enforced between tags."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list):
            return self.until(end)
        choices = " | ".join(self.quoted(one if isinstance(one, str) else dumps(one)) for one in listed)
        return f"({choices}) {self.quoted(end)}"

    def _python_arguments(self, schema: Mapping[str, Any]) -> str:
        properties = list(_properties(schema))
        required = [f"{self.quoted(f'{key}=')} {_json(own)}" for key, own, is_required in properties if is_required]
        others = [f"{self.quoted(f'{key}=')} {_json(own)}" for key, own, is_required in properties if not is_required]
        if required:
            return ' ", " '.join(required) + "".join(f' (", " {other})?' for other in others)
        if not others:
            return ""
        other = self._rule(" | ".join(others))
        return f'({other} (", " {other})*)?'

    def _rule(self, body: str) -> str:
        self._count += 1
        return self.add(f"part_{self._count}", body)


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, schema, and whether it is required, of each argument. What the schemas refer to goes with each."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties"), schema.get("required")
    for key, own in (properties if isinstance(properties, Mapping) else {}).items():
        own = own if isinstance(own, Mapping) else {}
        yield key, {**shared, **own}, isinstance(required, list) and key in required


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {dumps({**_WHITESPACE, **schema})}"
