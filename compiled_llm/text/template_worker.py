"""The process in which chat templates run, for chat_template.py.

A template is data of unknown origin. jinja2's sandbox keeps it from reaching Python. What it costs is bounded by the
operating system, whatever the template does: processor time for a request, address space for the process, which also
opens no files or sockets and starts no processes.

Messages are JSON. The settings are the seconds and the bytes; a request has the key ``source`` and, for a rendering,
the arguments of ``_render``.
"""

import functools
import json
import os
import re
import resource
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from compiled_llm.system.child_process import OUT_OF_MEMORY, ProcessorTime, decoded, encoded, limit_memory, own_channel

_MAX_TEMPLATES = 8  # that are kept compiled
_MAX_REASON = 1000  # characters of an error
# It uses all that jinja2 and Python read from disk when it is first used: afterwards no file can be opened.
_WARM_UP = r"{{ '\xe9' | wordwrap | pprint | striptags | urlize | tojson }}{{ lipsum(1), strftime_now('%c'), a.b }}"


class TemplateRefusal(TemplateError):
    """A template called ``raise_exception``."""


class _Namespace(Namespace):
    """As in transformers: no names with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that ``self`` may be one of the names
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a name in a namespace must not begin with an underscore, given {name!r:.100}")


class _GenerationTag(Extension):
    """``{% generation %}``, which marks the assistant's text for training: renders its content."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What transformers offers to chat templates.

    Attributes:
        unescaped: characters that ``tojson`` leaves as they are even where the template asks it for ASCII.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"], cache_size=0
        )
        self.unescaped = ""
        self.filters["tojson"] = self._tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        # In the place of the class, whose methods would change what the sandbox keeps from being changed.
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
        self.globals["namespace"] = _Namespace

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        if not ensure_ascii:
            return text
        return re.sub(rf"[^\x00-\x7f{re.escape(self.unescaped)}]", lambda match: json.dumps(match[0])[1:-1], text)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


# -- Requests


def _answer(environment: ChatEnvironment, compiled: Callable[[str], Template], request: dict[str, Any]) -> Any:
    source = request.pop("source")
    try:
        template = compiled(source)
    except MemoryError:
        raise
    except Exception as error:  # jinja2's errors, and Python's for nesting that is too deep
        return {"error": f"the chat template cannot be compiled: {_reason(error)}"}
    if not request:
        return _facts(environment.parse(source))
    try:
        return {"text": _render(environment, template, **request)}
    except MemoryError:
        raise
    except TemplateRefusal as error:
        return {"error": f"the chat template refuses the messages: {_reason(error)}"}
    except Exception as error:  # whatever the template does with values that it does not expect
        return {"error": f"the chat template failed: {_reason(error)}"}


def _facts(tree: nodes.Template) -> dict[str, list[str]]:
    """The names of the variables that a template reads, and the strings and names of attributes written in it."""
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
    written = [node.as_const() for node in tree.find_all((nodes.Const, nodes.TemplateData))]
    literals = {node.attr for node in tree.find_all(nodes.Getattr)} | {x for x in written if isinstance(x, str)}
    return {"names": sorted(names), "literals": sorted(literals)}


def _render(
    environment: ChatEnvironment, template: Template, variables: dict[str, Any], unescaped: str, max_characters: int
) -> str:
    environment.unescaped = unescaped
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > max_characters:
            raise TemplateRuntimeError(f"it makes a text of more than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        reason = f"{error.message} (line {error.lineno})"
    else:
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return reason[:_MAX_REASON]


# -- The process


def main() -> None:
    """Answer requests until the other side is gone."""
    channel = own_channel()
    seconds, num_bytes = decoded(channel.receive())
    environment = ChatEnvironment()
    compiled = functools.lru_cache(_MAX_TEMPLATES)(environment.from_string)
    _answer(environment, compiled, {"source": _WARM_UP, "variables": {}, "unescaped": "", "max_characters": 10_000})
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    limit_memory(num_bytes)
    answer = b""
    while True:
        channel.send(answer)
        try:
            request = channel.receive()
        except EOFError:
            return
        try:
            with ProcessorTime(seconds):
                answer = encoded(_answer(environment, compiled, decoded(request)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
