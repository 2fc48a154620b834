"""Grammars in processes of their own, so that one that needs too much time or memory ends alone.

``GrammarProcesses`` starts a process that takes in the vocabulary (grammar_worker.py), and that one forks a process for
each grammar. Only the last so many of them are kept: a generation whose process was given up goes over its tokens again
in a new one. No torch here.
"""

import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

# Messages that may be on their way to one process: more could fill the buffers of both directions.
_MOST_UNANSWERED = 32
# Seconds that pass at most while a process may compute for one: the machine may be busy with others.
_PATIENCE = 10.0
_OPEN, _FINISHED, _ERROR = b"\0", b"\1", b"\2"  # how replies begin


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What grammars are made of. W is ceil(size / 32).

    Attributes:
        text: the tokenizer as the text of a ``tokenizer.json``.
        size: one more than the largest id of tokenizer or model.
        words: int32 [W], a bit for each token of both tokenizer and model.
        eos_words: int32 [W], a bit for each token that ends a text.
        eos_token_ids: the same as a list.
    """

    text: str
    size: int
    words: np.ndarray
    eos_words: np.ndarray
    eos_token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class GrammarSource:
    """A grammar in the library's own terms, and what it may take.

    Attributes:
        kind: "json", "regex" or "lark".
        json_options: of "json": the library's, as (name, value).
        limits: arguments of the library's ``LLParserLimits``, likewise.
        seconds: of processor time, to compile it.
        seconds_at_once, seconds_a_token: of processor time for what may follow, all generations together: so much at
            any time, and as much on average.
        num_bytes: of memory, beside the vocabulary.
    """

    kind: str
    text: str
    json_options: tuple[tuple[str, Any], ...]
    limits: tuple[tuple[str, Any], ...]
    seconds: float
    seconds_at_once: float
    seconds_a_token: float
    num_bytes: int


def bits(token_ids: Iterable[int], size: int) -> np.ndarray:
    """int32 [ceil(size / 32)], with the bits of these tokens set."""
    found = np.zeros(-(-size // 32) * 32, np.uint8)
    found[list(token_ids)] = 1
    return np.packbits(found, bitorder="little").view("<i4").astype(np.int32)


def brief_reason(error: object) -> str:
    """The library's reason, without traces and in lines of bearable length."""
    lines = str(error).split("\n<")[0].splitlines()[:12]
    return "\n".join(line if len(line) <= 200 else f"{line[:200]}..." for line in lines).rstrip()


def encode_reply(words: bytes = b"", finished: bool = False, error: str | None = None) -> bytes:
    """What a worker answers: int32 words of the tokens that may follow and whether none but eos may, or an error."""
    if error is not None:
        return _ERROR + error.encode(errors="replace")
    return (_FINISHED if finished else _OPEN) + words


class Follower:
    """Where one generation is in its grammar. Made by ``GrammarProcesses.start``; used by one thread."""

    def __init__(self, processes: "GrammarProcesses", source: GrammarSource) -> None:
        self._processes, self._source = processes, source
        self._token_ids: list[int] = []
        self._process: _Process | None = None  # that has all its tokens, or did before it was given up
        self._name = -1
        self._reply: bytes | None = None

    def accept(self, token_id: int) -> None:
        """The token was generated. Does not wait."""
        self._token_ids.append(token_id)
        self._reply = None
        if self._process is not None and self._process.is_open:
            self._process.ask(self, self._name, [token_id])

    def look(self) -> tuple[np.ndarray, bool]:
        """int32 [W] of the tokens that may follow, and whether none but eos tokens may. Waits for the process.

        Raises:
            ValueError: the grammar or the generation cannot go on, or needs more time or memory than it may.
        """
        while self._reply is None:
            if self._process is None or not self._process.is_open:
                self._process = self._processes.process(self._source)
                self._name = self._process.new_name(self)
                self._process.ask(self, self._name, self._token_ids)
            self._process.wait_for(self)
        if self._reply.startswith(_ERROR):
            raise ValueError(self._reply[1:].decode())
        return np.frombuffer(self._reply, np.int32, offset=1), self._reply.startswith(_FINISHED)

    def take(self, reply: bytes) -> None:
        """What the process answered."""
        self._reply = reply


class GrammarProcesses:
    """The processes of one engine. Any thread may start a grammar.

    Args:
        most: processes that are kept, one for each grammar.
    """

    def __init__(self, vocabulary: Vocabulary, most: int) -> None:
        self._vocabulary = vocabulary
        self._most = most
        self._lock = threading.Lock()
        self._parent: _Parent | None = None
        self._kept: OrderedDict[GrammarSource, _Process] = OrderedDict()
        self._closed = False
        weakref.finalize(self, _close_all, self._kept)

    def start(self, source: GrammarSource) -> Follower:
        """A generation before its first token.

        Raises:
            ValueError: the grammar does not compile, can never be matched, or needs more than it may.
        """
        follower = Follower(self, source)
        try:
            follower.look()
        except ValueError:
            with self._lock:
                process = self._kept.pop(source, None)
            if process is not None:
                process.close()
            raise
        return follower

    def process(self, source: GrammarSource) -> "_Process":
        """The process of a grammar. If it is a new one, it may still be compiling."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            process = self._kept.pop(source, None)
            if process is None or not process.is_open:
                process = self._fork(source)
            self._kept[source] = process
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].close()
            return process

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            _close_all(self._kept)
            if self._parent is not None:
                self._parent.close()

    def _fork(self, source: GrammarSource) -> "_Process":
        if self._parent is not None and not self._parent.is_alive:  # killed by the system, when memory ran out
            self._parent.close()
            self._parent = None
        if self._parent is None:
            self._parent = _Parent(self._vocabulary)
        try:
            return _Process(self._parent.fork(), source)
        except OSError as error:
            raise ValueError(f"structured outputs: no process for the grammar: {error}") from error


class _Parent:
    """The process that has the vocabulary, and forks those of the grammars. ``ValueError``: it cannot be used."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._control, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                # -P: no module of the working directory
                [sys.executable, "-P", "-m", "compiled_llm.constraints.grammar_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self._end = weakref.finalize(self, _end_parent, self._control, self._popen)
        messages = Connection(os.dup(self._control.fileno()))
        try:
            messages.send(vocabulary)
            reply = messages.recv_bytes()
        except (EOFError, OSError) as error:
            reply = encode_reply(error=f"structured outputs: the process that compiles grammars has ended: {error!r}")
        finally:
            messages.close()
        if reply.startswith(_ERROR):
            self.close()
            raise ValueError(reply[1:].decode())

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self) -> Connection:
        """The connection to a new process. ``OSError``: this one has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        return Connection(ours.detach())

    def close(self) -> None:
        self._end()


def _end_parent(control: socket.socket, popen: subprocess.Popen) -> None:
    control.close()  # it ends by that
    try:
        popen.wait(1.0)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def _close_all(kept: "OrderedDict[GrammarSource, _Process]") -> None:
    while kept:
        kept.popitem()[1].close()


class _Process:
    """The process of one grammar, which ends itself when it uses more than it may."""

    def __init__(self, connection: Connection, source: GrammarSource) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # several threads may start generations of one grammar
        self._names = itertools.count()
        self._dropped: deque[int] = deque()  # by the garbage collector, at any moment
        self._unanswered: deque[weakref.ref[Follower]] = deque()
        self._patience = _PATIENCE * (1.0 + source.seconds)
        self._reason = (
            f"structured outputs: the grammar needs more than {source.seconds:g} s to compile or "
            f"{source.num_bytes >> 20} MiB of memory, or too much time for its tokens: simplify it"
        )
        self.is_open = True
        connection.send(source)

    def new_name(self, follower: Follower) -> int:
        name = next(self._names)
        weakref.finalize(follower, self._dropped.append, name).atexit = False
        return name

    def ask(self, follower: Follower, name: int, token_ids: list[int]) -> None:
        """Send tokens of a generation; its ``take`` gets the answer in some ``wait_for``."""
        with self._lock:
            if len(self._unanswered) >= _MOST_UNANSWERED:
                self._receive()
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            self._unanswered.append(weakref.ref(follower))
            try:
                self._connection.send((dropped, name, token_ids))
            except OSError:
                self._fail()
            except BaseException:
                self.close()
                raise

    def wait_for(self, follower: Follower) -> None:
        """Until ``follower`` has its answer, or this process is closed."""
        with self._lock:
            while self.is_open and follower._reply is None:
                self._receive()

    def close(self) -> None:
        """Of any thread, also while another waits for an answer: it ends the waiting."""
        self.is_open = False
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        try:
            reply = self._connection.recv_bytes() if self._connection.poll(self._patience) else None
        except (EOFError, OSError):
            reply = None
        except BaseException:  # an interrupt, half-way through a reply: nobody can read on from there
            self.close()
            raise
        if reply is None:
            self._fail()
        elif follower := self._unanswered.popleft()():
            follower.take(reply)

    def _fail(self) -> None:
        """It has ended, by what it was asked first and has not answered; the others go on in another process."""
        if self.is_open and self._unanswered and (follower := self._unanswered[0]()):
            follower.take(encode_reply(error=self._reason))
        self.close()
