"""Sandbox: the Jinja environment in which the chat template of a checkpoint renders, with a budget for all it does.

A template is data that nobody has read. Jinja's own sandbox keeps it from reaching Python; it does not keep it from
running for ever or filling the memory. Here only the filters, tests and methods named below exist, and they and the
operators pay out of a ``Budget``: for what they read before they run, and for what they make. What a loop or a macro
runs is paid by the calls of ``charge`` that chat_template.py puts into it.
"""

import json
import operator
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial, wraps
from string import Formatter
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from compiled_llm.template_budget import BYTES_PER_ITEM, ESCAPED, Budget, check_integer, count_items, size_in_bytes

_MAX_RANGE = 100_000
_MAX_WIDTH = 999  # of an indent, or of a field in a format
_MAX_DECIMALS = 15
_BYTES_PER_STRING = 56  # beside its characters

# Filters that go through their argument once, at most; those that compare what is in it or make text of it, however
# deep that is; those that reckon.
_SHALLOW = "d default first float int items last length count list map reject rejectattr reverse safe select selectattr"
_DEEP = "capitalize dictsort e escape lower max min sort string title trim unique upper"
_NUMBER_TESTS = "divisibleby even odd"
_TESTS = "boolean callable defined false float integer iterable mapping none number sameas sequence string true"
_TESTS += " undefined"
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}
_COMPARING_TESTS = {
    "eq": "== eq equalto",
    "ne": "!= ne",
    "lt": "< lt lessthan",
    "lteq": "<= le",
    "gt": "> gt greaterthan",
    "gteq": ">= ge",
    "in": "in",
}
_METHODS: dict[type, str] = {
    str: "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier"
    " islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix"
    " replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper",
    dict: "copy get items keys values",
    list: "copy count index",
    tuple: "count index",
    LoopContext: "changed cycle",
}
_SCALAR = str | int | float | None | Undefined
_PERCENT_FIELD = re.compile(r"%(?:\([^)%]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


class TemplateRefusal(TemplateError):
    """A template called ``raise_exception``."""


def _check_width(width: str | int) -> None:
    if width == "*" or (isinstance(width, str) and len(width) > 3) or (isinstance(width, int) and width > _MAX_WIDTH):
        raise TemplateRuntimeError(f"it formats to a width of more than {_MAX_WIDTH}, or one that is not written out")


class _Namespace(Namespace):
    """As transformers has it: no names with an underscore. As text it does not show what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that ``self`` may be one of the names
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a name in a namespace must not begin with an underscore, given {name!r:.100}")


class _GenerationTag(Extension):
    """``{% generation %}``, which marks what an assistant said, for training: renders what it holds."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """What transformers offers to chat templates, each operation paid out of ``budget``.

    Attributes:
        budget: of the rendering under way; there is one at a time.
        unescaped: characters that ``tojson`` leaves as they are even if ASCII is asked for.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        # The optimizer would run filters on constants while the template is compiled, before there is a budget. A
        # ``finalize`` that wants the context keeps the compiler from doing so too.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            finalize=self._output,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.budget = Budget(0, 0)
        self.unescaped = ""
        self.globals = {
            "dict": self._dict,
            "namespace": self._namespace,
            "raise_exception": self._raise_exception,
            "range": self._range,
            "strftime_now": self._strftime_now,
        }
        before: dict[str, Callable[..., None]] = {
            **dict.fromkeys(_SHALLOW.split(), self._before_shallow),
            **dict.fromkeys(_DEEP.split(), self._before_deep),
            "abs": self._before_number,
            "indent": self._before_indent,
            "join": self._before_join,
            "round": self._before_round,
            "replace": self._before_replace,
        }
        self.filters = {name: self._guarded(self.filters[name], before[name]) for name in before}
        self.filters["tojson"] = self._tojson
        all_tests: dict[str, Any] = self.tests
        tests = {name: all_tests[name] for name in _TESTS.split()}
        tests |= {name: self._guarded(all_tests[name], self._before_number) for name in _NUMBER_TESTS.split()}
        tests |= {name: self._guarded(all_tests[name], self._before_deep) for name in ("lower", "upper")}
        for comparison, names in _COMPARING_TESTS.items():
            tests |= {name: partial(self._test, comparison) for name in names.split()}
        self.tests = tests

    # -- What a template may call

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Only macros, ``loop``, what this environment offers, and the methods that are named above."""
        for name in ("_loop_vars", "_block_vars"):  # for functions that take the context, and here are none
            kwargs.pop(name, None)
        self.budget.step(1 + len(args) + len(kwargs))
        if isinstance(function, Macro | LoopContext | Undefined):
            return self.budget.make(super().call(context, function, *args, **kwargs))
        method = getattr(function, "__wrapped__", function)  # str.format comes wrapped by jinja2's sandbox
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "?")
        if owner is self:
            return function(*args, **kwargs)
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is None or name not in _METHODS[kind].split():
            raise SecurityError(f"it calls {name!r:.100} of {type(owner).__name__}, which chat templates cannot")
        if isinstance(owner, str):
            self._before_method(owner, name, args, kwargs)
        else:
            self._before_deep(*args, *kwargs.values())
            if name in ("copy", "count", "index"):
                self.budget.glance(owner)
        result = self.budget.make(function(*args, **kwargs))
        if isinstance(owner, str) and isinstance(result, list):
            self.budget.use(sum(_BYTES_PER_STRING + len(part) for part in result))
        return result

    def _dict(self, /, *args: Any, **kwargs: Any) -> dict:
        self._before_deep(*args, *kwargs.values())
        return self.budget.make(dict(*args, **kwargs))

    def _namespace(self, /, *args: Any, **kwargs: Any) -> _Namespace:
        self._before_deep(*args)
        return _Namespace(*args, **kwargs)

    def _raise_exception(self, message: Any) -> None:
        self._before_deep(message)
        raise TemplateRefusal(str(message)[:1000])

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > _MAX_RANGE:
            raise TemplateRuntimeError(f"it asks for a range of more than {_MAX_RANGE} numbers")
        return numbers

    def _strftime_now(self, format: str) -> str:
        if len(format) > 100:
            raise TemplateRuntimeError("it asks for a time in a format of more than 100 characters")
        return self.budget.make(datetime.now().strftime(format))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self.budget.read(value)
        _check_width(indent if isinstance(indent, int) else len(indent or ""))
        encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        not_ascii = re.compile(rf"[^\x00-\x7f{re.escape(self.unescaped)}]")
        chunks = []
        for chunk in encoder.iterencode(value):
            if ensure_ascii:
                chunk = not_ascii.sub(lambda match: json.dumps(match[0])[1:-1], chunk)
            chunks.append(self.budget.make(chunk))
        return "".join(chunks)

    # -- What chat_template.py writes in the place of syntax that jinja2's sandbox does not intercept

    def charge(self, steps: int, characters: int) -> bool:
        """For one run of the body of a loop or a macro: its nodes, and the text that it holds as it is."""
        self.budget.step(steps)
        self.budget.use(characters)
        return True

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        self.budget.fits(size_in_bytes(value))
        return self.budget.make(value[start:stop:step])

    def concatenate(self, *values: Any) -> str:
        self.budget.fits(sum(self.budget.read(value) for value in values))
        return self.budget.make("".join(map(str, values)))

    def compare(self, left: Any, *others: Any) -> Any:
        """``left`` with what follows: the name of a comparison and a value, and so on while each holds."""
        result = None
        for name, right in zip(others[::2], others[1::2], strict=True):
            look = self.budget.glance if isinstance(left, _SCALAR) or isinstance(right, _SCALAR) else self.budget.read
            look(left)
            look(right)
            result = _COMPARISONS[name](left, right)
            if not result:
                break
            left = right
        return result

    def key(self, value: Any) -> Any:
        """A key of a dict: no tuple, since a tuple of tuples of tuples may take for ever to hash."""
        if not isinstance(value, _SCALAR):
            raise TemplateRuntimeError(f"a key must be a str or a number, given {type(value).__name__}")
        return value

    # -- What jinja2 asks

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.step()
        return super().getitem(obj, self.key(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_integer(left)
        check_integer(right)
        sequences = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "*" and len(sequences) == 1:
            times = right if sequences[0] is left else left
            self.budget.fits(size_in_bytes(sequences[0]) * times if isinstance(times, int) else 0)
        elif operator == "%" and isinstance(left, str):
            self._before_percent(left, right)
        elif operator != "+":
            self._before_number(left, right)
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                _check_power(left, right)
        return self.budget.make(super().call_binop(context, operator, left, right))

    @pass_context
    def _output(self, context: Context, value: Any) -> str:
        self.budget.fits(self.budget.read(value))
        return self.budget.make(str(value))

    # -- What is paid before an operation

    def _guarded(self, function: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or the context

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            before(*args[skipped:], **kwargs)
            return self.budget.make(function(*args, **kwargs))

        return guarded

    def _test(self, comparison: str, left: Any, right: Any) -> Any:
        return self.compare(left, comparison, right)

    def _before_shallow(self, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            self.budget.glance(value)
            self.budget.fits(BYTES_PER_ITEM * count_items(value))

    def _before_deep(self, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            self.budget.fits(ESCAPED * self.budget.read(value))

    def _before_number(self, *values: Any) -> None:
        for value in values:
            # Some operations would take a str too, and format or repeat it.
            if not isinstance(value, int | float | Undefined):
                raise TemplateRuntimeError(f"it reckons with a {type(value).__name__}")

    def _before_round(self, value: Any, precision: int = 0, method: str = "common") -> None:
        self._before_number(value, precision)
        if abs(precision) > _MAX_DECIMALS:
            raise TemplateRuntimeError(f"it rounds to more than {_MAX_DECIMALS} decimals")

    def _before_indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
        _check_width(width if isinstance(width, int) else len(width))
        size = self.budget.read(text)
        lines = text.count("\n") + 1 if isinstance(text, str) else 1
        self.budget.fits(size + lines * _MAX_WIDTH)

    def _before_join(self, values: Any, separator: Any = "", attribute: Any = None) -> None:
        self.budget.glance(attribute)
        self.budget.fits(self.budget.read(values) + count_items(values) * ESCAPED * (self.budget.read(separator) + 64))

    def _before_replace(self, text: Any, old: Any, new: Any, count: Any = None) -> None:
        size, longest = self.budget.read(text), self.budget.read(old)
        times = text.count(old) if isinstance(text, str) and isinstance(old, str) else size + longest
        self.budget.fits(ESCAPED * (size + times * self.budget.read(new)))

    def _before_method(self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a str: ``text.name(*args, **kwargs)``."""
        if name == "join":
            self._before_join(args[0] if args else (), text)
        elif name == "replace":
            self._before_replace(text, *args, **kwargs)
        elif name == "format":
            self._before_format(text, args, kwargs)
        else:
            self._before_deep(text, *args, *kwargs.values())

    def _before_percent(self, text: str, values: Any) -> None:
        fields = _PERCENT_FIELD.findall(text)
        for width, precision in fields:
            _check_width(width)
            _check_width(precision)
        self._before_fields(text, len(fields), self.budget.read(values))

    def _before_format(self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fields = [field for field in Formatter().parse(text) if field[1] is not None]
        for _, _, form, _ in fields:
            for width in re.findall(r"\d+|\{", form or ""):
                _check_width(width.replace("{", "*"))
        self._before_fields(text, len(fields), self.budget.read(args) + self.budget.read(kwargs))

    def _before_fields(self, text: str, fields: int, size_of_values: int) -> None:
        self.budget.fits(len(text) + fields * (ESCAPED * size_of_values + 3 * _MAX_WIDTH))


def _check_power(base: int, exponent: int) -> None:
    if base.bit_length() * exponent > 64:
        raise TemplateRuntimeError(f"it raises {base} to the power of {exponent}")
