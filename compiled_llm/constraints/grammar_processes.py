"""Grammars in processes of their own, so that a grammar that needs too much time or memory ends alone.

``GrammarProcesses`` starts a process that reads the vocabulary (grammar_worker.py) and forks itself for each
grammar. Only the last ``most`` of them are kept: a generation whose process was closed or killed goes over its
tokens again in a new one. A generation fails if its process reached a limit, or if two ended while it was their turn.
No torch here.
"""

import dataclasses
import functools
import itertools
import os
import signal
import socket
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from compiled_llm.api.argument_checks import UnservableError
from compiled_llm.system.child_process import OUT_OF_MEMORY, Channel, ChildProcess, decoded, described_end, encoded

# Messages that may be on their way to one process: more could fill the buffers of both directions.
_MOST_UNANSWERED = 32
# Seconds to wait for each second that a process may compute: the machine may be busy.
_PATIENCE = 10.0
_OPEN, _FINISHED, _ERROR = b"\0", b"\1", b"\2"  # the first byte of a reply
FORK, STATUS = b"f", b"s"  # what the first process is asked: for a process, and how one has ended
_STATUS_SECONDS = 10.0  # to wait for the answer to the latter
# Processes that end with a generation's tokens unanswered, one after the other, before the generation is to blame.
_MOST_ENDS = 2


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
        json_options: of "json": the library's options, as (name, value).
        limits: arguments of the library's ``LLParserLimits``, as (name, value).
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
    """int32 [ceil(size / 32)], with the bits of ``token_ids`` set."""
    found = np.zeros(-(-size // 32) * 32, np.uint8)
    found[list(token_ids)] = 1
    return np.packbits(found, bitorder="little").view("<i4").astype(np.int32)


def brief_reason(error: object) -> str:
    """The library's reason, without traces and in short lines."""
    lines = str(error).split("\n<")[0].splitlines()[:12]
    return "\n".join(line if len(line) <= 200 else f"{line[:200]}..." for line in lines).rstrip()


class _Drafts:
    """A question of a generation that changes nothing of it.

    Attributes:
        reply, num_ends: as in ``GrammarState``.
    """

    def __init__(self) -> None:
        self.reply: bytes | None = None
        self.num_ends = 0


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
        self.num_ends = 0  # of processes, since the last reply, in its turn

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

    def after(self, token_ids: Sequence[int]) -> list[np.ndarray]:
        """What may follow each of these, if they come one after the other: as ``allow`` writes it.

        Fewer than they are where one may not follow, is one that ends a text, or completes the text so that nothing
        else may follow; none where the process has ended. The state stays as it is.
        """
        self._received()
        process, size = self._process, -(-self._vocabulary.model_size // 32)
        if self._ended or process is None or not process.is_open or not token_ids:
            return []
        question = _Drafts()
        process.ask(question, self._name, [], list(token_ids))
        process.wait_for(question)
        if question.reply is None or question.reply.startswith(_ERROR):
            return []
        words = np.frombuffer(question.reply, np.int32, offset=1)
        return list(words.reshape(-1, len(self._vocabulary.words))[:, :size])

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
        self._parent_pid: int | None = None  # of which ``_num_forked`` processes were asked for
        self._num_forked = 0
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
            try:
                return self._forked(source)
            except OSError:  # the first process was killed a moment ago
                self._parent.end()
                return self._forked(source)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"structured outputs: no process for the grammar: {error}") from error

    def _forked(self, source: GrammarSource) -> "_Process":
        try:
            parent = self._parent.channel()
        except ValueError as error:  # the library cannot read the tokenizer
            raise UnservableError(str(error)) from error
        if self._parent_pid != self._parent.pid:
            self._parent_pid, self._num_forked = self._parent.pid, 0
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(parent.socket, [FORK], [theirs.fileno()])
        status = functools.partial(self._status, self._parent_pid, self._num_forked)
        self._num_forked += 1
        return _Process(Channel(ours), source, status)

    def _status(self, parent_pid: int | None, number: int) -> int | None:
        """How the parent's ``number``-th process has ended, as ``ChildProcess.status``. None: the parent has, too."""
        with self._lock:
            if self._closed or parent_pid is None or self._parent.pid != parent_pid:
                return None
            channel, deadline = self._parent.channel(), time.monotonic() + _STATUS_SECONDS
            try:
                channel.socket.sendall(STATUS)
                channel.send(encoded(number), deadline)
                status = decoded(channel.receive(deadline))
            except (OSError, EOFError):
                self._parent.end()
                return None
            except BaseException:  # an interrupt: the answer must not be taken for another one
                self._parent.end()
                raise
            assert status is None or isinstance(status, int)
            return status


def _close_all(kept: "OrderedDict[GrammarSource, _Process]") -> None:
    while kept:
        kept.popitem()[1].close()


class _Process:
    """The process of one grammar, which ends itself when it uses more than it may.

    Args:
        status: how it has ended, as ``ChildProcess.status``.
    """

    def __init__(self, channel: Channel, source: GrammarSource, status: Callable[[], int | None]) -> None:
        self._channel, self._source, self._status = channel, source, status
        weakref.finalize(self, channel.socket.close)
        self._owner = os.getpid()
        self._lock = threading.RLock()  # several threads may start generations of one grammar
        self._names = itertools.count()
        self._dropped: deque[int] = deque()  # by the garbage collector, at any moment
        self._unanswered: deque[weakref.ref[GrammarState] | weakref.ref[_Drafts]] = deque()
        self._has_answered = False
        self._patience = _PATIENCE * (1.0 + source.seconds)
        self._unsent = [encoded(dataclasses.astuple(source))]  # before anything else
        self.is_open = True

    def add(self, state: GrammarState) -> int:
        name = next(self._names)
        weakref.finalize(state, self._dropped.append, name).atexit = False
        return name

    def ask(self, state: "GrammarState | _Drafts", name: int, token_ids: list[int], drafts: Sequence[int] = ()) -> None:
        """Send tokens of a generation; ``state`` gets the reply in some ``wait_for``, unless the process ends before.

        With ``drafts`` there are no tokens, and the reply is what may follow each of the drafts.
        """
        with self._lock:
            if len(self._unanswered) >= _MOST_UNANSWERED:
                self._receive()
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            self._unanswered.append(weakref.ref(state))  # type: ignore[arg-type]
            self._unsent.append(encoded([dropped, name, token_ids, list(drafts)]))
            try:
                while self._unsent:
                    self._channel.send(self._unsent.pop(0), self._deadline())
            except TimeoutError:
                self._fail(timed_out=True)
            except OSError:
                if self._has_answered:  # it ended before, so by nothing that it is asked now
                    self._unanswered.pop()
                while self.is_open:  # what it has answered can still be read
                    self._receive()
            except BaseException:
                self.close()
                raise

    def wait_for(self, state: "GrammarState | _Drafts") -> None:
        """Until ``state`` has its reply, or this process is closed."""
        with self._lock:
            while self.is_open and state.reply is None:
                self._receive()

    def close(self) -> None:
        """End the process. Any thread may call it, also while another waits for an answer, which ends the waiting."""
        self.is_open = False
        if os.getpid() == self._owner:  # not in a fork of this process, which has its sockets too
            with suppress(OSError):
                self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _deadline(self) -> float:
        return time.monotonic() + self._patience

    def _receive(self) -> None:
        try:
            reply = self._channel.receive(self._deadline())
        except TimeoutError:
            self._fail(timed_out=True)
        except (EOFError, OSError):
            self._fail()
        except BaseException:  # an interrupt may come in the middle of a reply
            self.close()
            raise
        else:
            self._has_answered = True
            if state := self._unanswered.popleft()():
                state.reply, state.num_ends = reply, 0

    def _fail(self, timed_out: bool = False) -> None:
        """It has ended, perhaps by the first of what it has not answered; the others go on in another process."""
        if self.is_open and self._unanswered and (state := self._unanswered[0]()):
            state.num_ends += 1
            reason = f"gave no answer within {self._patience:g} s" if timed_out else self._reason(state.num_ends)
            if reason is not None:
                state.reply = encode_reply(error=f"structured outputs: the grammar {reason}")
        self.close()

    def _reason(self, num_ends: int) -> str | None:
        """Why a generation has failed in whose turn this process has ended. None: another process may do it."""
        source, status = self._source, self._status()
        if status == -signal.SIGPROF and self._has_answered:
            most = f"at most {source.seconds_at_once:g} s at once and {source.seconds_a_token:g} s a token"
            return f"took too much processor time for its tokens ({most}): simplify it"
        if status == -signal.SIGPROF:
            compiling = f"more than {source.seconds:g} s of processor time to compile"
            return f"took {compiling}, or too much for its first tokens: simplify it"
        memory = f"{source.num_bytes >> 20} MiB of memory"
        if status == OUT_OF_MEMORY:
            return f"needs more than {memory}: simplify it"
        if num_ends < _MOST_ENDS:
            return None
        return f"ended {num_ends} processes, each of which had {memory} (the last one: {described_end(status)})"
