"""The processes of grammars: what happens when one is killed, hangs, or meets a fork of the process that has them."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.constraints.grammars import GrammarCompiler, GrammarState
from compiled_llm.text.tokenizer import Tokenizer
from tests.forked import in_fork

DEMO_MODEL = Path(__file__).parents[2] / "compiled_llm" / "demo_model"
VOCAB_SIZE = 4096
EOS = 0
# It takes minutes to compile, or all memory.
SLOW: dict[str, Any] = {"grammar": "start: T\nT: " + " & ".join(f"/(a|b)*a(a|b){{{count}}}/" for count in range(24))}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


def allowed(state: GrammarState) -> list[int]:
    words = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    state.allow(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def grammar_pids(compiler: GrammarCompiler) -> set[int]:
    """Of the processes that were forked for grammars."""
    parent = compiler._processes._parent.pid
    children = Path(f"/proc/{parent}/task/{parent}/children")
    return {int(pid) for pid in children.read_text().split()}


def kill(pids: Iterable[int]) -> None:
    """As somebody else would: their parent waits for them, this process does not."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)


def test_a_process_that_is_killed_is_replaced_and_nobody_sees_it(tokenizer: Tokenizer) -> None:
    """While it is idle, with generations under way, and together with the process that forks."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    params = StructuredOutputsParams(regex="[ab]{9}")
    state, a = compiler.start(params), tokenizer.encode("a")[0]
    expected = allowed(state)
    for number in range(8):
        first = compiler._processes._parent.pid
        assert first is not None
        kill([*grammar_pids(compiler), *([first] if number % 3 == 1 else [])])
        if number % 2:
            assert allowed(compiler.start(params)) == expected, "a new generation"
        state.accept(a)
        assert allowed(state)
    state.accept(a)
    assert state.finished
    compiler.close()


def test_a_process_that_is_killed_at_work_is_replaced_once_and_the_second_end_is_told(tokenizer: Tokenizer) -> None:
    """It takes long to answer here, so that it can be killed before."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS], max_seconds=60)
    first = compiler.start(StructuredOutputsParams(regex="a"))
    killed = grammar_pids(compiler)

    def kill_those_at_work() -> None:
        deadline = time.monotonic() + 60
        for _ in range(2):
            while not (found := grammar_pids(compiler) - killed) and time.monotonic() < deadline:
                time.sleep(0.005)
            killed.update(found)
            kill(found)

    killer = threading.Thread(target=kill_those_at_work)
    killer.start()
    with pytest.raises(
        ValueError, match=r"ended 2 processes, each .* 512 MiB of memory \(the last one: signal SIGKILL\)$"
    ):
        compiler.start(StructuredOutputsParams(**SLOW))
    killer.join()
    assert allowed(first)
    compiler.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_before_it_has_its_grammar_is_replaced_once(
    times: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process that forks, which has ended nothing, goes on."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    params = StructuredOutputsParams(regex="[ab]{9}")
    expected = allowed(compiler.start(StructuredOutputsParams(regex="[ab]{8}")))
    parent, known, num_killed, send_fds = compiler._processes._parent.pid, grammar_pids(compiler), 0, socket.send_fds

    def send_and_kill(*args: Any) -> int:
        nonlocal num_killed
        sent = send_fds(*args)
        if num_killed < times:
            while not (found := grammar_pids(compiler) - known):
                time.sleep(0.001)
            known.update(found)
            kill(found)
            num_killed += 1
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_kill)
    if times == 1:
        assert allowed(compiler.start(params)) == expected
    else:
        with pytest.raises(ValueError, match=r"ended 2 processes, each .* \(the last one: signal SIGKILL\)$"):
            compiler.start(params)
    assert (num_killed, compiler._processes._parent.pid) == (times, parent)
    compiler.close()


def test_a_process_that_does_not_answer_is_said_to_have_given_no_answer(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    params = StructuredOutputsParams(regex="[ab]{2}")
    state = compiler.start(params)
    (pid,) = grammar_pids(compiler)
    (process,) = compiler._processes._kept.values()
    process._patience = 0.2
    os.kill(pid, signal.SIGSTOP)
    state.accept(tokenizer.encode("a")[0])
    with pytest.raises(ValueError, match=r"the grammar gave no answer within 0\.2 s$"):
        allowed(state)
    os.kill(pid, signal.SIGCONT)
    assert allowed(compiler.start(params))
    compiler.close()


def test_a_fork_of_this_process_ends_no_process_of_a_grammar(tokenizer: Tokenizer) -> None:
    """Neither by closing, nor by collecting its objects."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    state = compiler.start(StructuredOutputsParams(regex="[ab]{2}"))
    pids = grammar_pids(compiler) | {compiler._processes._parent.pid}

    def close() -> None:
        compiler.close()

    def collect() -> None:
        nonlocal compiler, state
        del compiler, state
        gc.collect()

    for work in (close, collect):
        assert in_fork(work) == 0
        state.accept(tokenizer.encode("a")[0])
        assert allowed(state)
        assert grammar_pids(compiler) | {compiler._processes._parent.pid} == pids
    compiler.close()


def test_an_interpreter_that_was_forked_ends_no_process_as_it_ends() -> None:
    text = DEMO_MODEL / "tokenizer.json"
    code = f"""
import os, pathlib, sys
from compiled_llm.constraints.grammar_processes import GrammarProcesses, GrammarSource, Vocabulary, bits
words = bits(range({VOCAB_SIZE}), {VOCAB_SIZE})
vocabulary = Vocabulary(pathlib.Path({str(text)!r}).read_text(), {VOCAB_SIZE}, {VOCAB_SIZE}, [{EOS}], words)
processes = GrammarProcesses(vocabulary, 2)
states = [processes.start(GrammarSource("regex", text, (), (), 3.0, 1.0, 0.02, 2**29)) for text in "ab"]
pid = processes._parent.pid
if os.fork() == 0:
    sys.exit()
os.wait()
assert processes._parent.pid == pid
for state in states:
    state.accept(next(token_id for token_id in range(256) if state._words()[token_id // 32] >> token_id % 32 & 1))
    assert state.finished
assert all(process.is_open for process in processes._kept.values())
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
