"""Templates in a process of their own: whatever one does, it ends soon, in bounded memory, and harms no other."""

import contextlib
import gc
import itertools
import linecache
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread, Timer
from types import FrameType
from typing import Any

import pytest

from compiled_llm.system import child_process
from compiled_llm.text import chat_template
from compiled_llm.text.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate, TemplateProcess
from tests.forked import in_fork

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


# What a template may do, and where it ends.
TIME, MEMORY = "took longer than 0.2 s of processor time", "needed more than 256 MiB of memory"
HOSTILE = {
    # Long strings and lists out of one operation.
    "repeat": ("{{ 'x' * 10**9 }}", MEMORY),
    "join": ("{{ (['a' * 10000] * 2000) | join }}", "makes a text of more than 1000000 characters|" + TIME),
    "range": ("{{ range(1000000000) | list }}", "OverflowError: Range too big"),
    "folded constants": ("{{ ('x' * 1000000) | replace('x', 'y' * 1000000) | length }}", MEMORY),
    # Long runs.
    "count in one call": (
        "{% set a = [1] * 30000 %}{% set b = [1] * 29999 + [2] %}{{ ([a] * 100000).count(b) }}", TIME),
    "loops": (repeated("{% for j in range(100000) %}{% endfor %}"), TIME),
    "recursive macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "deep list": (doubling("[ns.s]", "1").replace("range(60)", "range(9999)") + "{{ ns.s }}", "RecursionError"),
    # Out of the sandbox, or at the messages.
    "class": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "class by a filter": ("{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}", "is unsafe"),
    "class by a format": ("{{ '{0.__class__.__mro__}'.format('') }}", "is unsafe"),
    "globals": ("{{ raise_exception.__globals__.x }}", "is unsafe"),
    "dunder in a namespace": (ITSELF + "{% set ns.__class__ = 1 %}", "must not begin with an underscore"),
    "dunder in a new namespace": ("{{ namespace(__class__=1) }}", "must not begin with an underscore"),
    "append": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    "update": ("{{ messages[0].update(a=1) }}", "access to attribute 'update' of 'dict' object is unsafe"),
    "update by its class": ("{{ dict.update(messages[0], a=1) }}", "has no attribute 'update'"),
    "include": ("{% include 'x' %}", "no loader for this environment"),
    "import": ("{% import '/etc/passwd' as y %}", "no loader for this environment"),
    "extends": ("{% extends 'x' %}", "no loader for this environment"),
    # For the compiler.
    "parentheses": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "RecursionError"),
    "nested ifs": ("{% if a %}" * 6000, "RecursionError"),
    "nested loops": ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "SyntaxError|RecursionError"),
    "many filters": ("{{ a" + "|trim" * 12000 + " }}", "RecursionError|" + TIME),
}  # fmt: skip
# More ways to take memory or time. Each takes all that there is.
MORE = {
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format('x') }}",
    "json indent": "{{ messages | tojson(indent=1000000000) }}",
    "doubled by ~": doubling("ns.s ~ ns.s ~ 'y'", "'x'"),
    "doubled macros": DOUBLED + "{{ m60() }}",
    "bomb as json": BOMB + "{{ ns.a | tojson }}",
    "repeat a list": "{{ [0] * 10**9 }}",
    "percent by a name with a parenthesis": "{{ '%(a%b)3000000000d' % {'a%b': 1} }}",
    "percent in a test": "{{ '%1000000000d' is even }}",
    "format repeated": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join by much": "{{ ('a' * 1000000).join(['b'] * 100000) }}",
    "indent": "{{ 'x' | indent(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "squares": doubling("ns.s * ns.s", "3"),
    "find": repeated("{% if s.find('c') %}{% endif %}"),
    "bombs compared": BOMB + "{{ ns.a == ns.b }}",
    "bomb in an error": BOMB + "{{ raise_exception(ns.a) }}",
    "percent repeated": "{{ '%(a)s' * 100000 % {'a': 'x' * 100000} }}",
    "sum": "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "lipsum": "{{ lipsum(100000) }}",
    "round to a power": "{{ 1.5 | round(1000000000000000000, 'ceil') }}",
    "doubled by +": doubling("ns.s + ns.s", "'x'"),
    "doubled list": doubling("ns.s + ns.s", "[1]"),
    "doubled format": doubling("'%s%s' % (ns.s, ns.s)", "'x'"),
    "doubled in a block": doubling("x", "'x'").replace("{% set ns.s", IN_BLOCK + "{% set ns.s"),
    "loops with a test": repeated("{% for j in range(100000) if none %}{% endfor %}"),
    "block of texts": repeated("{% set x %}{% for j in range(99) %}" + "y" * 999 + "{% endfor %}{% endset %}"),
    "long body": repeated("{% set x = [" + "1," * 20000 + "] %}"),
    "doubled callers": CALLER + "{% call m() %}" * 15 + "x" * 9999 + "{% endcall %}" * 15,
    "recursive loop": BOMB + "{% for x in ns.a recursive %}{{ loop(x) if x is iterable }}{% endfor %}",
    "in": repeated("{% if 'c' in s %}{% endif %}"),
    "equal": repeated("{% if s == s[:-1] ~ ' ' %}{% endif %}"),
    "in a list": "{% set l = range(100000) | list %}" + repeated("{% if 'c' in l %}{% endif %}"),
    "sort": repeated("{% set x = range(100000) | sort %}"),
    "kept slices": repeated("{% set s = s[1:] %}"),
    "kept parts": repeated("{% set x = s.split() %}"),
    "attributes": ITSELF + "{{ ([ns] * 100000) | map(attribute='" + "a." * 20000 + "a') | list }}",
    "bomb as text": BOMB + "{{ ns.a }}",
    "bomb by ~": BOMB + "{{ 'a' ~ ns.a }}",
    "bomb in upper case": BOMB + "{{ ns.a is upper }}",
    "bomb formatted": BOMB + "{{ '%s' % ns.a }}",
    "bomb in a format": BOMB + "{{ '{}'.format(ns.a) }}",
    "bombs that change": BOMB + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "bombs sorted": BOMB + "{{ [ns.a, ns.b] | sort }}",
    "bombs tested": BOMB + "{{ [ns.a] | select('eq', ns.b) | list }}",
    "bomb as a key": TUPLES + "{{ {ns.a: 1} }}",
    "bomb got": TUPLES + "{{ {}.get(ns.a) }}",
    "bomb made unique": TUPLES + "{{ [ns.a] | unique | list }}",
    "long sum": "{{ 1" + "+1" * 30000 + " }}",
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=0.2, memory_bytes=2**28)
    yield process
    process.close()


def render(source: str, process: TemplateProcess, **variables: Any) -> str:
    given = {"messages": [{"role": "user", "content": "hello"}], **variables}
    return ChatTemplate(source, process).render(given, 10**6)


def pid_of(process: TemplateProcess) -> int:
    pid = process._child.pid
    assert pid is not None
    return pid


# -- Hostile templates


def check_hostile(source: str, reason: str, process: TemplateProcess) -> None:
    assert len(source) <= MAX_TEMPLATE_CHARACTERS
    with pytest.raises(ValueError, match=r"^the chat template ") as error:
        render(source, process)
    said = str(error.value)
    assert any(part in said for part in reason.split("|")), said
    assert len(said) < 1200


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_an_error(name: str, process: TemplateProcess) -> None:
    check_hostile(*HOSTILE[name], process)


@pytest.mark.battery
@pytest.mark.parametrize("name", MORE)
def test_another_hostile_template_ends_in_an_error(name: str, process: TemplateProcess) -> None:
    check_hostile(MORE[name], f"{TIME}|{MEMORY}|RecursionError", process)


_LOOP = "{% for _ in range(99999) %}"
_ENDLESS = 2 * _LOOP + "{{ messages | tojson | length }}" + 2 * "{% endfor %}"


def test_after_a_limit_the_next_chat_is_served(process: TemplateProcess) -> None:
    for source in ("{{ 'x' * 10**9 }}", _ENDLESS):
        with pytest.raises(ValueError, match=r"needed more than|took longer than"):
            render(source, process)
        assert render("{{ messages[0].content }}", process) == "hello"


def test_each_rendering_has_its_whole_time(process: TemplateProcess) -> None:
    source = "{% for i in range(10000) %}{% for j in range(5) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, process)
    template.render({}, 10)
    pid, begun = pid_of(process), time.process_time()
    for _ in range(20):  # which take more than 0.2 s together
        template.render({}, 10)
    assert pid_of(process) == pid
    assert time.process_time() - begun < 1, "the work is done elsewhere"


def test_a_template_keeps_nothing_from_one_rendering_to_the_next(process: TemplateProcess) -> None:
    source = "{% if secret is defined %}{% set kept = secret %}{% set ns = namespace(kept=secret) %}{% endif %}"
    source += "{{ kept is defined }} {{ ns is defined }} {{ secret is defined }}"
    assert render(source, process, secret="x") == "True True True"
    assert render(source, process) == "False False False"


# -- The process


def test_the_process_has_nothing_of_this_one(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    process.close()
    assert process._child.pid is None
    assert render("x", process) == "x"
    proc = Path(f"/proc/{pid_of(process)}")
    assert sorted(file.name for file in (proc / "fd").iterdir()) == ["0", "1", "2"]
    assert not {entry.split("=")[0] for entry in (proc / "environ").read_text().split("\0") if entry} - {
        *child_process._INHERITED,
        *child_process._ENVIRONMENT,
        "LC_CTYPE",
    }
    assert "torch" not in (proc / "maps").read_text()
    limits = (proc / "limits").read_text()
    for name in ("Max open files", "Max processes", "Max file size", "Max core file size"):
        assert re.search(rf"{name} +0 +0 ", limits), limits
    assert re.search(rf"Max address space +{2**28} +{2**28} ", limits)
    assert os.getsid(pid_of(process)) != os.getsid(0), "an interrupt from a terminal reaches it not"


def test_an_interrupt_at_any_line_leaves_no_answer_for_the_next_request() -> None:
    process = TemplateProcess()
    renders = {"variables": {}, "unescaped": "", "max_characters": 99}
    pids = set()
    for line in itertools.count():
        if interrupted(lambda: process.ask({"source": "old", **renders}, 999), line) is not None:
            break
        if line % 4 == 3:  # the next ones are interrupted before, while and after it starts
            assert process.ask({"source": "new", **renders}, 999) == {"text": "new"}
            pids.add(pid_of(process))
    assert line > 30
    process.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def interrupted(function: Callable[[], Any], line: int) -> Any:
    """What ``function`` returns, or None if it is interrupted at the start of the ``line``-th line that it runs."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        files = chat_template.__file__, child_process.__file__
        if frame.f_code.co_filename not in files or frame.f_code.co_name in ("end", "_end"):
            return None
        # Not as a ``with`` or a ``try`` begins or ends: there the interpreter looks for no interrupt.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("with ", "try:")) and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(before)


def test_an_interrupt_while_a_template_runs_ends_it() -> None:
    process = TemplateProcess(seconds=30)
    assert render("x", process) == "x"
    pid = pid_of(process)
    timer = Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))

    def interrupted() -> None:
        timer.start()
        render("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", process)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    timer.join()
    assert not Path(f"/proc/{pid}").exists()
    assert render("{{ 1 }}", process) == "1"
    process.close()


def test_a_process_that_was_killed_is_started_again(process: TemplateProcess) -> None:
    assert render("x", process) == "x"
    os.kill(pid_of(process), signal.SIGKILL)
    while process._child.pid is not None:
        time.sleep(0.01)
    assert render("y", process) == "y"


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_at_work_is_replaced_once_and_the_second_end_is_told(times: int) -> None:
    process = TemplateProcess(seconds=30)
    render("x", process)
    killed: list[int] = []
    first = pid_of(process)
    # The second begins with less than half a second, and its work has no end. The first one's is short.
    limits = {first: seconds_used(first) + 0.05}

    def kill() -> None:
        deadline = time.monotonic() + 60
        while len(killed) < times and time.monotonic() < deadline:
            pid = process._child.pid
            if pid is not None and pid not in killed and seconds_used(pid) > limits.get(pid, 0.5):
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    killer = Thread(target=kill)
    killer.start()
    source = "{% for i in range(turns) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    if times == 1:
        assert render(source, process, turns=240) == "x"
    else:
        with pytest.raises(ValueError, match=r"in which it ran, and a new one too: signal SIGKILL$"):
            render(source, process, turns=99999)
    killer.join()
    assert len(killed) == times
    process.close()


def seconds_used(pid: int) -> float:
    """Of processor time."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def test_a_fork_of_this_process_ends_it_neither_by_close_nor_by_collecting_it(process: TemplateProcess) -> None:
    assert render("x", process) == "x"
    pid = pid_of(process)

    def collect() -> None:
        parts = process._child._parts
        process._child = None  # type: ignore[assignment]
        gc.collect()
        assert parts.process is None, "its finalizer was called"

    for work in (process.close, collect):
        assert in_fork(work) == 0
        assert render("y", process) == "y"
        assert pid_of(process) == pid
    assert in_fork(lambda: render("z", process)) == 0, "a fork has a process of its own"
    assert pid_of(process) == pid


def test_a_process_that_does_not_answer_is_not_waited_for() -> None:
    process = TemplateProcess(seconds=0.02)
    assert render("x", process) == "x"
    pid = pid_of(process)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=r"the chat template gave no answer within 0\.3 s"):
        render("y" * 60_000, process)
    assert not Path(f"/proc/{pid}").exists()
    process.close()


def test_a_crash_and_an_answer_that_is_too_long_are_errors_of_the_template(process: TemplateProcess) -> None:
    request = {"source": "{{ 'x' * 900 }}", "variables": {}, "unescaped": "", "max_characters": 1000}
    with pytest.raises(ValueError, match="the chat template makes 912 bytes, and 100 are allowed"):
        process.ask(request, 100)
    assert len(process.ask(request, 1000)["text"]) == 900
    with pytest.raises(ValueError, match=r"ended the process in which it ran, and a new one too: exit status"):
        process.ask({}, 1000)  # without a source
    assert len(process.ask(request, 1000)["text"]) == 900


def test_a_process_that_cannot_be_started_is_no_error_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"process for chat templates cannot start \(exit status 1\)"):
        render("x", process)
    monkeypatch.undo()
    monkeypatch.setattr(process._child, "_packages", ())
    with pytest.raises(RuntimeError, match="No module named 'jinja2'"):
        render("x", process)
    monkeypatch.undo()
    assert render("x", process) == "x"
    process.close()


def test_the_process_ends_with_its_owner() -> None:
    closed, dropped = TemplateProcess(), TemplateProcess()
    pids = []
    for process in (closed, dropped):
        assert render("x", process) == "x"
        pids.append(pid_of(process))
    closed.close()
    closed.close()
    del dropped, process
    gc.collect()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_the_process_ends_when_the_interpreter_does(end: str) -> None:
    code = f"""
import os
from compiled_llm.text.chat_template import ChatTemplate, TemplateProcess
from tests.forked import in_fork
process = TemplateProcess()
ChatTemplate("x", process)
print(process._child.pid, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    for _ in range(1200):
        if not Path(f"/proc/{int(done.stdout)}/exe").exists():  # a zombie, if nobody waits for orphans, has none
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")
