"""Hostile chat templates: each ends soon, in bounded memory, in an error that says what it did."""

import json
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest

from compiled_llm import chat_template
from compiled_llm.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate

STEPS, TEXT, WIDTH = "takes too many steps", "makes too much text", "formats to a width of more than 999"
# Lists that hold themselves' predecessors twice, 60 times over: few objects, and 2**60 to walk through.
BOMB = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
BOMB += "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
TUPLES = BOMB.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("a=[1]", "a=(1,)")
DOUBLED = "{% macro m0() %}{% endmacro %}" + "".join(
    f"{{% macro m{i + 1}() %}}{{{{ m{i}() }}}}{{{{ m{i}() }}}}{{% endmacro %}}" for i in range(60)
)
IN_BLOCK = "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
CALLER = "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
ITSELF = "{% set ns = namespace() %}{% set ns.a = ns %}"


def doubling(expression: str, start: str) -> str:
    """``ns.s`` doubles 60 times."""
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}{{% set ns.s = {expression} %}}{{% endfor %}}"
    )


def repeated(statement: str) -> str:
    return f"{{% set s = 'a b ' * 250000 %}}{{% for i in range(100000) %}}{statement}{{% endfor %}}"


HOSTILE = {
    # Long strings and lists out of one operation.
    "repeat": ("{{ 'x' * 10**9 }}", TEXT),
    "repeat by a str": ("{{ 10**9 * 'x' }}", TEXT),
    "repeat a list": ("{{ [0] * 10**9 }}", TEXT),
    "repeat a slice": ("{{ 'x' * 10**6 * 10**3 }}", TEXT),
    "percent": ("{{ '%1000000000d' % 1 }}", WIDTH),
    "percent precision": ("{{ '%.1000000000f' % 1 }}", WIDTH),
    "percent star": ("{{ '%*d' % (1000000000, 1) }}", WIDTH),
    "percent repeated": ("{{ '%(a)s' * 100000 % {'a': 'x' * 100000} }}", TEXT),
    "percent in a test": ("{{ '%1000000000d' is even }}", "reckons with a str"),
    "percent in another": ("{{ '%1000000000d' is divisibleby(3) }}", "reckons with a str"),
    "format": ("{{ '{:1000000000}'.format('x') }}", WIDTH),
    "format nested": ("{{ '{:{}}'.format('x', 1000000000) }}", WIDTH),
    "format repeated": ("{{ ('{0}' * 100000).format('x' * 100000) }}", TEXT),
    "format_map": ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", "calls 'format_map' of str"),
    "round": ("{{ 'x' | round(9, 'ceil') }}", "reckons with a str"),
    "replace": ("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}", TEXT),
    "replace nothing": ("{{ ('a' * 100000).replace('', 'b' * 100000) }}", TEXT),
    "join": ("{{ (['a' * 10000] * 2000) | join }}", TEXT),
    "join by much": ("{{ ('a' * 1000000).join(['b'] * 100000) }}", TEXT),
    "indent": ("{{ 'x' | indent(1000000000) }}", WIDTH),
    "indent lines": ("{{ ('\n' * 1000000) | indent(900) }}", TEXT),
    "json indent": ("{{ messages | tojson(indent=1000000000) }}", WIDTH),
    "json separators": ("{{ range(9999) | list | tojson(separators=('x' * 100000, ':')) }}", TEXT),
    "ljust": ("{{ 'x'.ljust(1000000000) }}", "calls 'ljust' of str"),
    "expandtabs": ("{{ '\t'.expandtabs(1000000000) }}", "calls 'expandtabs' of str"),
    "translate": ("{{ 'x'.translate({120: 'y' * 100}) }}", "calls 'translate' of str"),
    "to_bytes": ("{{ (1).to_bytes(1000000000, 'big') }}", "calls 'to_bytes' of int"),
    "center": ("{{ 'x' | center(1000000000) }}", "No filter named 'center'"),
    "batch": ("{{ [1] | batch(1000000000, 0) | list }}", "No filter named 'batch'"),
    "sum": ("{{ ([[1]] * 100000) | sum(start=[]) }}", "No filter named 'sum'"),
    "lipsum": ("{{ lipsum(100000) }}", "'lipsum' is undefined"),
    "cycler": ("{{ cycler(1) }}", "'cycler' is undefined"),
    # Long integers.
    "power": ("{{ 9 ** 9 ** 9 }}", "to the power of 9"),
    "round to a power": ("{{ 1.5 | round(1000000000000000000, 'ceil') }}", "rounds to more than 15 decimals"),
    "squares": (doubling("ns.s * ns.s", "3"), "integer of more than 64 bits"),
    "integer": ("{{ ('f' * 1000) | int(base=16) }}", "integer of more than 64 bits"),
    "constant": ("{{ 99999999999999999999 }}", "integer of more than 64 bits"),
    "range": ("{{ range(1000000000) | list }}", "range of more than 100000 numbers"),
    # Strings and lists that double.
    "doubled by +": (doubling("ns.s + ns.s", "'x'"), TEXT),
    "doubled by ~": (doubling("ns.s ~ ns.s", "'x'"), TEXT),
    "doubled list": (doubling("ns.s + ns.s", "[1]"), TEXT),
    "doubled format": (doubling("'%s%s' % (ns.s, ns.s)", "'x'"), TEXT),
    "doubled in a block": (doubling("x", "'x'").replace("{% set ns.s", IN_BLOCK + "{% set ns.s"), TEXT),
    # Loops and macros.
    "loops": (repeated("{% for j in range(100000) %}{% endfor %}"), STEPS),
    "loops with a test": (repeated("{% for j in range(100000) if none %}{% endfor %}"), STEPS),
    "block of texts": (repeated("{% set x %}{% for j in range(99) %}" + "y" * 999 + "{% endfor %}{% endset %}"), TEXT),
    "long body": (repeated("{% set x = [" + "1," * 20000 + "] %}"), STEPS),
    "recursive macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "doubled macros": (DOUBLED + "{{ m60() }}", STEPS),
    "doubled macros with long texts": (DOUBLED.replace("}{%", "}" + "x" * 500 + "{%") + "{{ m60() }}", TEXT),
    "doubled callers": (CALLER + "{% call m() %}" * 15 + "x" * 9999 + "{% endcall %}" * 15, TEXT),
    "recursive loop": (BOMB + "{% for x in ns.a recursive %}{{ loop(x) if x is iterable }}{% endfor %}", STEPS),
    # Reading much, many times, and keeping much.
    "find": (repeated("{% if s.find('c') %}{% endif %}"), TEXT + "|" + STEPS),
    "in": (repeated("{% if 'c' in s %}{% endif %}"), STEPS),
    "equal": (repeated("{% if s == s[:-1] ~ ' ' %}{% endif %}"), STEPS + "|" + TEXT),
    "in a list": ("{% set l = range(100000) | list %}" + repeated("{% if 'c' in l %}{% endif %}"), STEPS),
    "sort": (repeated("{% set x = range(100000) | sort %}"), STEPS + "|" + TEXT),
    "kept slices": (repeated("{% set s = s[1:] %}"), TEXT),
    "kept lists": (repeated("{% set x = range(100000) | list %}"), STEPS),
    "kept parts": (repeated("{% set x = s.split() %}"), TEXT),
    "long list": ("{{ ('一' * 2000000) | list | length }}", TEXT),
    "attributes": (ITSELF + "{{ ([ns] * 100000) | map(attribute='" + "a." * 20000 + "a') | list }}", STEPS),
    # Few objects that are many to walk through.
    "bomb as text": (BOMB + "{{ ns.a }}", STEPS),
    "bomb as a str": (BOMB + "{{ ns.a | string }}", STEPS),
    "bomb as json": (BOMB + "{{ ns.a | tojson }}", STEPS),
    "bomb by ~": (BOMB + "{{ 'a' ~ ns.a }}", STEPS),
    "bomb in upper case": (BOMB + "{{ ns.a is upper }}", STEPS),
    "bomb formatted": (BOMB + "{{ '%s' % ns.a }}", STEPS),
    "bomb in a format": (BOMB + "{{ '{}'.format(ns.a) }}", STEPS),
    "bomb in an error": (BOMB + "{{ raise_exception(ns.a) }}", STEPS),
    "bombs compared": (BOMB + "{{ ns.a == ns.b }}", STEPS),
    "bombs in a list": (BOMB + "{{ ns.a in [ns.b] }}", STEPS),
    "bombs in a loop": (BOMB + "{% for x in [1, ns.b] %}{{ ns.a in loop }}{% endfor %}", STEPS),
    "bombs that change": (BOMB + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}", STEPS),
    "bombs sorted": (BOMB + "{{ [ns.a, ns.b] | sort }}", STEPS),
    "loop as a value": (TUPLES + "{% for x in [ns.a] %}{{ loop | unique | list }}{% endfor %}", "uses 'loop' as"),
    "bombs tested": (BOMB + "{{ [ns.a] | select('eq', ns.b) | list }}", STEPS),
    "bombs counted": (BOMB + "{{ [ns.a].count(ns.b) }}", STEPS),
    "bomb as a key": (TUPLES + "{{ {ns.a: 1} }}", "key must be a str or a number, given tuple"),
    "bomb looked up": (TUPLES + "{{ {}[ns.a] }}", "key must be a str or a number, given tuple"),
    "bomb got": (TUPLES + "{{ {}.get(ns.a) }}", STEPS),
    "bomb in a dict": (TUPLES + "{{ ns.a in {} }}", STEPS),
    "bomb made unique": (TUPLES + "{{ [ns.a] | unique | list }}", STEPS),
    "bomb in dict()": (TUPLES + "{{ dict([(ns.a, 1)]) }}", STEPS),
    "deep list": (doubling("[ns.s]", "1").replace("range(60)", "range(9999)") + "{{ ns.s }}", "more than 64 deep"),
    # Out of the sandbox, or at the messages.
    "class": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "class by a filter": ("{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}", "is unsafe"),
    "class by a format": ("{{ '{0.__class__.__mro__}'.format('') }}", "is unsafe"),
    "globals": ("{{ raise_exception.__globals__.x }}", "is unsafe"),
    "environment": ("{{ namespace.__self__.budget }}", "is unsafe"),
    "dunder in a namespace": (ITSELF + "{% set ns.__class__ = 1 %}", "must not begin with an underscore"),
    "append": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    "update": ("{{ messages[0].update(a=1) }}", "access to attribute 'update' of 'dict' object is unsafe"),
    "include": ("{% include 'x' %}", "chat templates cannot use 'include'"),
    "import": ("{% if false %}{% import 'x' as y %}{% endif %}", "chat templates cannot use 'import'"),
    "from": ("{% from 'x' import y %}", "chat templates cannot use 'fromimport'"),
    "extends": ("{% extends 'x' %}", "chat templates cannot use 'extends'"),
    "block": ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "chat templates cannot use 'block'"),
    "autoescape": ("{% autoescape true %}{% endautoescape %}", "chat templates cannot use"),
    # For the compiler.
    "parentheses": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "RecursionError"),
    "nested ifs": ("{% if a %}" * 6000, "RecursionError"),
    "nested loops": ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "SyntaxError|RecursionError"),
    "long sum": ("{{ 1" + "+1" * 30000 + " }}", "RecursionError"),
    "many filters": ("{{ a" + "|trim" * 12000 + " }}", "RecursionError"),
    "folded constants": ("{{ ('x' * 1000000) | replace('x', 'y' * 1000000) | length }}", TEXT),
}  # fmt: skip

# A process of its own, which the system stops if a template takes more memory, or all of them minutes. For those that
# would take all steps, the usual number is cut to a tenth, to save time.
RUN = """
import json, resource, sys
from compiled_llm import chat_template
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
steps = chat_template._STEPS
assert "torch" not in sys.modules
said = {}
for name, source in json.load(sys.stdin).items():
    chat_template._STEPS = steps // 10 if name.startswith("bomb") else steps
    try:
        template = chat_template.ChatTemplate(source)
        said[name] = "rendered " + template.render({"messages": [{"role": "user", "content": "hello"}]}, 10**6)[:100]
    except ValueError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    sources = json.dumps({name: source for name, (source, _) in HOSTILE.items()})
    done = subprocess.run([sys.executable, "-c", RUN], input=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_an_error(name: str, said: dict[str, str]) -> None:
    source, reason = HOSTILE[name]
    assert len(source) <= MAX_TEMPLATE_CHARACTERS
    assert any(part in said[name] for part in reason.split("|")), said[name]
    assert said[name].startswith("the chat template ")
    assert "MemoryError" not in said[name]
    assert len(said[name]) < 1200


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables, 10_000)


def test_the_usual_budget_ends_too() -> None:
    with pytest.raises(ValueError, match=STEPS):
        render("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}")


LONG = "{% if a %}{% endif %}" * 100


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(200) %}" + LONG + "{% endfor %}",
        "{% for i in range(200) if [" + "a, " * 200 + "] and none %}{% endfor %}",
        "{% macro m() %}" + LONG + "{% endmacro %}{% for i in range(200) %}{{ m() }}{% endfor %}",
        "{% macro m() %}{% for i in range(200) %}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call m() %}" + LONG + "{% endcall %}",
    ],
)
def test_what_runs_often_is_paid_for_each_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_STEPS", 200_000)
    assert render(source) == ""
    monkeypatch.setattr(chat_template, "_STEPS", 20_000)
    with pytest.raises(ValueError, match=STEPS):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ ('ab ' * 2500000).split() | length }}", "{{ ('一' * 2000000) | list | length }}"]
)
def test_much_is_refused_before_it_is_made(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=TEXT):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_a_namespace_shows_nothing_of_what_it_holds() -> None:
    assert render("{% set ns = namespace(a='secret') %}{% set ns.b = ns %}{{ ns }}{{ ns.a }}") == "<namespace>secret"


def test_more_messages_may_cost_more() -> None:
    source = (
        "{% for a in messages %}{% for b in messages %}{% for c in range(20) %}{% endfor %}{% endfor %}{% endfor %}"
    )
    few, many = [1] * 20, [1] * 2000
    assert render(source, messages=few) == ""
    with pytest.raises(ValueError, match=STEPS):
        render(source, messages=many)
    reads = "{% for i in range(50) %}{% if 'z' in messages[0] %}{% endif %}{% endfor %}"
    assert render(reads, messages=["x" * 1_000_000]) == ""
    with pytest.raises(ValueError, match=STEPS):
        render(reads.replace("messages[0]", "x").replace("{%", "{% set x = 'x' * 1000000 %}{%", 1), messages=["x"])
    assert render("{{ (messages[0] * 6) | length }}", messages=["x" * 1_000_000]) == "6000000"
    with pytest.raises(ValueError, match=TEXT):
        render("{{ ('x' * 1000000 * 9) | length }}", messages=["x"])


def test_one_rendering_leaves_the_next_its_whole_budget() -> None:
    template = ChatTemplate("{% for i in range(5000) %}{{ messages }}{% endfor %}")
    for _ in range(3):
        assert len(template.render({"messages": "x"}, 10_000)) == 5000


def test_an_iterator_stays_where_it_is_when_it_is_looked_at() -> None:
    source = "{% set it = [1, 2] | map('string') %}{{ 'x' if it }}{{ it is iterable }}{{ it is sequence }}"
    assert render(source + "{{ it | join(',') }}{{ it | join(',') }}") == "xTrueFalse1,2"
