"""Grammars in processes of their own, so that one that needs too much time or memory ends alone.

``GrammarProcesses`` starts a process that reads the vocabulary (grammar_worker.py), and that one forks a process for
each grammar. Only the last ``most`` of them are kept: a generation whose process was closed goes over its tokens again
in a new one. No torch here.
"""

import dataclasses
import functools
import itertools
import socket
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from compiled_llm.child_process import Channel, ChildProcess, encoded

# Messages that may be on their way to one process: more could fill the buffers of both directions.
_MOST_UNANSWERED = 32
# Seconds to wait for each second that a process may compute: the machine may be busy.
_PATIENCE = 10.0
_OPEN, _FINISHED, _ERROR = b"\0", b"\1", b"\2"  # the first byte of a reply


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What grammars are made of. W is ceil(size / 32).

    Attributes:
        text: the tokenizer as the text of a ``tokenizer.json``.
        size: one more than the largest id of tokenizer or model.
        model_size: V, of the model.
        eos_token_ids: the tokens that end a text.
        words: int32 [W], a bit for each token of both tokenizer and model.
        eos_words: int32 [W], a bit for each token that ends a text.
    """

    text: str
    size: int
    model_size: int
    eos_token_ids: list[int]
    words: np.ndarray

    @functools.cached_property
    def eos_words(self) -> np.ndarray:
        return bits(self.eos_token_ids, self.size)

    @property
    def settings(self) -> list[Any]:
        """Values of JSON, for ``of_settings``."""
        return [self.text, self.size, self.model_size, self.eos_token_ids, self.words.tolist()]

    @classmethod
    def of_settings(cls, settings: list[Any]) -> "Vocabulary":
        text, size, model_size, eos_token_ids, words = settings
        return cls(text, size, model_size, eos_token_ids, np.array(words, np.int32))


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
    """The library's reason, without traces and in short lines."""
    lines = str(error).split("\n<")[0].splitlines()[:12]
    return "\n".join(line if len(line) <= 200 else f"{line[:200]}..." for line in lines).rstrip()


def encode_reply(words: bytes = b"", finished: bool = False, error: str | None = None) -> bytes:
    """What a worker answers: int32 words of the tokens that may follow and whether none but eos may, or an error."""
    if error is not None:
        return _ERROR + error.encode(errors="replace")
    return (_FINISHED if finished else _OPEN) + words


class GrammarState:
    """Where one generation is in its grammar. Made by ``GrammarProcesses.start``; used by one thread at a time.

    ``allow``, ``accept`` and ``finished`` wait for the process, and raise a ``ValueError`` if the grammar or the
    generation cannot go on, or needs more time or memory than it may.
    """

    def __init__(self, processes: "GrammarProcesses", vocabulary: Vocabulary, source: GrammarSource) -> None:
        self._processes, self._vocabulary, self._source = processes, vocabulary, source
        self._token_ids: list[int] = []
        self._ended = False  # by an eos token
        self._process: _Process | None = None  # that has all its tokens, or had until it was closed
        self._name = -1
        self.reply: bytes | None = None  # of the process, to its last token

    def allow(self, words: np.ndarray) -> None:
        """Write which tokens may follow. Eos tokens may if the text is complete, and no others if nothing can follow.

        Args:
            words: int32 [ceil(V / 32)], written: bit v % 32 of word v // 32 says whether token v may follow.
        """
        assert words.dtype == np.int32, words.dtype
        assert words.shape == (-(-self._vocabulary.model_size // 32),), words.shape
        words[:] = self._words()[: len(words)]

    def accept(self, token_id: int) -> None:
        """The token was generated. What may follow it is computed meanwhile.

        Raises:
            ValueError: it may not follow (the state stays as it was).
        """
        name = f"structured outputs: token {token_id}, after {len(self._token_ids)} of the grammar's,"
        if not 0 <= token_id < self._vocabulary.model_size:
            raise ValueError(f"{name} must be below the vocabulary's size, {self._vocabulary.model_size}")
        if not self._words()[token_id // 32] >> token_id % 32 & 1:
            raise ValueError(f"{name} may not follow")
        if token_id in self._vocabulary.eos_token_ids:
            self._ended = True
            return
        self._token_ids.append(token_id)
        self.reply = None
        if self._process is not None and self._process.is_open:
            self._process.ask(self, self._name, [token_id])

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an eos token may follow, or one did."""
        return self._ended or self._received().startswith(_FINISHED)

    def _words(self) -> np.ndarray:
        """int32 [W] of the tokens that may follow."""
        return self._vocabulary.eos_words if self._ended else np.frombuffer(self._received(), np.int32, offset=1)

    def _received(self) -> bytes:
        while self.reply is None:
            if self._process is None or not self._process.is_open:
                self._process = self._processes.process(self._source)
                self._name = self._process.add(self)
                self._process.ask(self, self._name, self._token_ids)
            self._process.wait_for(self)
        if self.reply.startswith(_ERROR):
            raise ValueError(self.reply[1:].decode())
        return self.reply


class GrammarProcesses:
    """The processes of one engine. Any thread may start a grammar.

    Args:
        most: processes that are kept, one for each grammar.
    """

    def __init__(self, vocabulary: Vocabulary, most: int) -> None:
        self._vocabulary, self._most = vocabulary, most
        self._lock = threading.Lock()
        module = "compiled_llm.constraints.grammar_worker"
        packages = "numpy", "llguidance"
        self._parent = ChildProcess("the process that compiles grammars", module, packages, vocabulary.settings)
        self._kept: OrderedDict[GrammarSource, _Process] = OrderedDict()
        self._closed = False
        weakref.finalize(self, _close_all, self._kept)

    def start(self, source: GrammarSource) -> GrammarState:
        """A generation before its first token.

        Raises:
            ValueError: the grammar does not compile, can never be matched, or needs more than it may.
        """
        state = GrammarState(self, self._vocabulary, source)
        try:
            _ = state.finished
        except ValueError:
            with self._lock:
                process = self._kept.pop(source, None)
            if process is not None:
                process.close()
            raise
        return state

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
            self._parent.end()

    def _fork(self, source: GrammarSource) -> "_Process":
        try:
            parent = self._parent.channel()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(parent.socket, [b"f"], [theirs.fileno()])
            return _Process(Channel(ours), source)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"structured outputs: no process for the grammar: {error}") from error


def _close_all(kept: "OrderedDict[GrammarSource, _Process]") -> None:
    while kept:
        kept.popitem()[1].close()


class _Process:
    """The process of one grammar, which ends itself when it uses more than it may."""

    def __init__(self, channel: Channel, source: GrammarSource) -> None:
        self._channel = channel
        weakref.finalize(self, channel.socket.close)
        self._lock = threading.RLock()  # several threads may start generations of one grammar
        self._names = itertools.count()
        self._dropped: deque[int] = deque()  # by the garbage collector, at any moment
        self._unanswered: deque[weakref.ref[GrammarState]] = deque()
        self._patience = _PATIENCE * (1.0 + source.seconds)
        self._reason = (
            f"structured outputs: the grammar needs more than {source.seconds:g} s to compile or "
            f"{source.num_bytes >> 20} MiB of memory, or too much time for its tokens: simplify it"
        )
        self.is_open = True
        channel.send(encoded(dataclasses.astuple(source)), self._deadline())

    def add(self, state: GrammarState) -> int:
        name = next(self._names)
        weakref.finalize(state, self._dropped.append, name).atexit = False
        return name

    def ask(self, state: GrammarState, name: int, token_ids: list[int]) -> None:
        """Send tokens of a generation; it gets the reply in some ``wait_for``."""
        with self._lock:
            if len(self._unanswered) >= _MOST_UNANSWERED:
                self._receive()
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            self._unanswered.append(weakref.ref(state))
            try:
                self._channel.send(encoded([dropped, name, token_ids]), self._deadline())
            except OSError:
                self._fail()
            except BaseException:
                self.close()
                raise

    def wait_for(self, state: GrammarState) -> None:
        """Until ``state`` has its reply, or this process is closed."""
        with self._lock:
            while self.is_open and state.reply is None:
                self._receive()

    def close(self) -> None:
        """Of any thread, also while another waits for an answer: it ends the waiting."""
        self.is_open = False
        with suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _deadline(self) -> float:
        return time.monotonic() + self._patience

    def _receive(self) -> None:
        try:
            reply = self._channel.receive(self._deadline())
        except (EOFError, OSError):
            self._fail()
        except BaseException:  # an interrupt may come in the middle of a reply
            self.close()
            raise
        else:
            if state := self._unanswered.popleft()():
                state.reply = reply

    def _fail(self) -> None:
        """It has ended, by what it was asked first and has not answered; the others go on in another process."""
        if self.is_open and self._unanswered and (state := self._unanswered[0]()):
            state.reply = encode_reply(error=self._reason)
        self.close()
