"""Readers of tool calls, one for each layout of ``CallFormat``. Each waits for text, and gives events as it comes.

A reader returns whether it found what its format says. If not, what it read is no call, and nothing was given of it.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, CallEnds, Event, Tool
from compiled_llm.parsing.formats import CallFormat
from compiled_llm.parsing.source import TextSource, Waiting
from compiled_llm.parsing.values import dumps, of_python, of_schema

_ARGUMENTS = ("arguments", "parameters")
# Calls and keywords of Python; the second pattern matches what may still become one.
_CALL = re.compile(r"\s*+[,\[]?+\s*+([A-Za-z_][\w.-]*+)\("), re.compile(r"\s*+[,\[]?+\s*+([A-Za-z_][\w.-]*+)?")
_KEY = re.compile(r"\s*+,?+\s*+([A-Za-z_]\w*+)\s*+="), re.compile(r"\s*+,?+\s*+([A-Za-z_]\w*+)?\s*+")
_NUMBERED = re.compile(r"functions\.(.+):\d+")  # Kimi's name of a call


class Calls:
    """The calls of a text, as ``events``."""

    def __init__(self, events: list[Event], make_id: Callable[[], str], source: TextSource) -> None:
        self._events, self._make_id, self._source = events, make_id, source
        self._count, self._has_arguments = 0, False
        self._ids: set[str] = set()

    def begin(self, name: str, call_id: str | None = None) -> None:
        call_id = self._make_id() if call_id is None or call_id in self._ids else call_id
        self._ids.add(call_id)
        self._events.append(CallBegins(self._count, call_id, name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self._count, text))
            self._has_arguments = True

    def end(self) -> None:
        if not self._has_arguments and not self._source.has_ended:
            self.arguments("{}")
        self._has_arguments = False
        self._events.append(CallEnds(self._count))
        self._count += 1


class CallReader:
    """Reads what comes after a mark of ``known``, or at the start of a text whose format needs no mark."""

    def __init__(self, known: CallFormat, tools: Collection[Tool], source: TextSource, events: list[Event]) -> None:
        self.calls = Calls(events, known.make_id, source)
        self._known, self._source = known, source
        self._tools = {tool.name: tool for tool in tools}

    def read(self, mark: str) -> Waiting[bool]:
        """``mark``: that was read before; "": none was, and only a tool that exists is called."""
        layouts = {"json": self._json_calls, "named": self._named, "tagged": self._tagged, "python": self._python_calls}
        self._source.keep(mark)
        found = yield from layouts[self._known.layout](mark)
        ends = self._known.ends
        while found and (yield from self._source.next(ends)):
            pass
        if found and self._source.is_cut(ends):
            self._source.rest = ""
        return found

    def _takes(self, name: Any, mark: str) -> bool:
        return isinstance(name, str) and bool(name) and (bool(mark) or name in self._tools)

    # -- {"name": "f", "arguments": {}}, or a list of such

    def _json_calls(self, mark: str) -> Waiting[bool]:
        source, found = self._source, False
        while opening := (yield from source.next(("{", "[", "]", ",", ";") if mark or found else ("{",))):
            if opening == "{":
                if not (yield from self._json_call(mark)):
                    return False
                found = True
                source.keep()
        return found

    def _json_call(self, mark: str) -> Waiting[bool]:
        """After its "{"."""
        source, calls, name, held = self._source, self.calls, None, None
        has_begun = False
        while (yield from source.next(('"',))):
            source.back('"')
            key = _text_of((yield from source.taken_value()))
            if not (yield from source.next((":",))) or not (mark or key in ("name", "type", *_ARGUMENTS)):
                break
            if key not in _ARGUMENTS or has_begun:
                value = yield from source.taken_value()
                name = _text_of(value) if key == "name" else name
            elif name is None:
                held = yield from source.taken_value()
            elif not self._takes(name, mark):
                return False
            else:
                source.kept()
                calls.begin(name)
                has_begun = True
                yield from self._json_arguments()
            yield from source.next((",",))
        is_closed = yield from source.next(("}",))
        if not has_begun:
            if not self._takes(name, mark) or not is_closed or (held is None and not mark):
                return False
            assert name is not None
            calls.begin(name)
            calls.arguments(_plain_arguments(held or ""))
        calls.end()
        return True

    def _json_arguments(self) -> Waiting[None]:
        """As they are written, but for what is JSON in a string, and for null."""
        source = self._source
        opening = yield from source.next(("{", "["))
        if opening:
            source.back(opening)
            yield from source.value(self.calls.arguments)
        else:
            value = yield from source.taken_value()
            if source.rest or not source.has_ended:  # else the text ended amid it
                self.calls.arguments(_plain_arguments(value))

    # -- name, mark, {}

    def _named(self, mark: str) -> Waiting[bool]:
        known, source, calls = self._known, self._source, self.calls
        if "{" in known.after_name and (opening := (yield from source.next(("[", "{")))):
            source.back(opening)
            return (yield from self._json_calls(mark))
        if known.before_name and not (yield from source.next((known.before_name,))):
            return False
        name, after = yield from source.taken_until(known.after_name)
        call_id = None
        if after == "[CALL_ID]":
            call_id, after = yield from source.taken_until(("[ARGS]",))
        if after == "{":
            source.back(after)
        if after is None or not name.strip():
            return False
        source.kept()
        if numbered := _NUMBERED.fullmatch(name.strip()):
            name, call_id = numbered[1], name.strip()
        calls.begin(name.strip(), call_id)
        yield from source.value(calls.arguments)
        yield from source.next(("```",))
        calls.end()
        return True

    # -- <function=f><parameter=a>1</parameter></function>

    def _tagged(self, mark: str) -> Waiting[bool]:
        known, source, calls = self._known, self._source, self.calls
        if known.before_name not in ("", mark) and not (yield from source.next((known.before_name,))):
            return False
        name, after = yield from source.taken_until(known.after_name)
        if after is None or not name.strip():
            return False
        if after in (known.tags[0], *known.ends):
            source.back(after)
        source.kept()
        calls.begin(name.strip())
        yield from self._tagged_arguments(name.strip())
        calls.end()
        return True

    def _tagged_arguments(self, name: str) -> Waiting[None]:
        source, calls = self._source, self.calls
        before_key, after_key, before_value, after_value = self._known.tags
        schemas = self._tools[name].parameters.get("properties") if name in self._tools else None
        separator = "{"
        while (yield from source.next((before_key,))):
            key, _ = yield from source.taken_until((after_key,))
            if before_value.strip():
                yield from source.next((before_value,))
            value, end = yield from source.taken_until((after_value,))
            if end is None:
                return  # the text ended amid it
            schema = schemas.get(key.strip()) if isinstance(schemas, Mapping) else None
            value = value.removeprefix("\n").removesuffix("\n")
            calls.arguments(f"{separator}{dumps(key.strip())}: {of_schema(value, schema)}")
            separator = ", "
        is_closed = yield from source.next(self._known.ends)
        if separator != "{" and (is_closed or not source.is_cut((before_key, *self._known.ends))):
            calls.arguments("}")

    # -- [f(a=1), g()]

    def _python_calls(self, mark: str) -> Waiting[bool]:
        source, found = self._source, False
        if not mark and not (yield from source.next(("[",))):
            return False
        while call := (yield from source.match(*_CALL)):
            name = _CALL[0].fullmatch(call)[1]  # type: ignore[index]
            if not self._takes(name, mark):
                return False
            source.kept()
            self.calls.begin(name)
            yield from self._python_arguments()
            self.calls.end()
            found = True
            source.keep()
        if found:
            yield from source.next(("]",))
        return found

    def _python_arguments(self) -> Waiting[None]:
        source, calls, separator = self._source, self.calls, "{"
        while key := (yield from source.match(*_KEY)):
            value = yield from source.taken_value("\"'", "")
            if source.has_ended and not source.rest:
                return  # the text ended amid it
            calls.arguments(f"{separator}{dumps(_KEY[0].fullmatch(key)[1])}: {of_python(value)}")  # type: ignore[index]
            separator = ", "
        if (yield from source.next((")",))) and separator != "{":
            calls.arguments("}")


def _text_of(value: str) -> str | None:
    """What a string of JSON spells; None: it is none."""
    try:
        found = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _plain_arguments(value: str) -> str:
    """Arguments that are no object as they are written: JSON in a string, null, or nothing."""
    return "{}" if value in ("", "null") else _text_of(value) or value
