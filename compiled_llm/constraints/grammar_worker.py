"""Processes that compile grammars and follow them, for grammar_processes.py.

The first process reads the vocabulary, which may take seconds, and forks a process for each grammar. That one limits
itself: the kernel ends it when it uses more processor time than it may, whatever the library is busy with, and gives it
no more memory than it may have. No torch here, and no thread before a fork.
"""

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiled_llm.constraints.grammar_processes import STATUS, GrammarSource, Vocabulary, brief_reason, encode_reply
from compiled_llm.system.child_process import (
    OUT_OF_MEMORY,
    Channel,
    ProcessorTime,
    decoded,
    encoded,
    limit_memory,
    own_channel,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_TOKENS_BETWEEN_RESTARTS = 256  # of a generation's matcher
# The library compiles by recursion, and would kill the process at the stack's end. The deepest texts of
# structured_outputs._MAX_CHARACTERS that we could make take less than 32 MiB.
_STACK_BYTES = 256 * 2**20
_MOST_STATUSES = 1024  # that are kept of processes that have ended
_SECONDS_TO_END = 5.0  # of a process that has closed its socket


def main() -> None:
    """Read a vocabulary, then fork a process for each socket that comes, until the other side is gone."""
    channel, children = own_channel(), _Children()
    vocabulary = Vocabulary.of_settings(decoded(channel.receive()))
    try:
        import llguidance

        tokenizer = llguidance.LLTokenizer(vocabulary.text, n_vocab=vocabulary.size, eos_token=vocabulary.eos_token_ids)
    except BaseException as error:  # a panic of the library is no Exception
        channel.send(f"structured outputs: llguidance cannot use this tokenizer: {brief_reason(error)}".encode())
        return
    channel.send(b"")
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel.socket, 1, 1)
        if not data:
            return
        if data == STATUS:
            channel.send(encoded(children.status(decoded(channel.receive()))))
            continue
        pid = os.fork()
        if pid == 0:
            channel.socket.close()
            _follow(Channel(socket.socket(fileno=descriptors[0])), tokenizer, vocabulary)
            os._exit(0)
        os.close(descriptors[0])
        children.add(pid)


class _Children:
    """How the forked processes have ended, by their numbers in the order of the forks."""

    def __init__(self) -> None:
        self._count = 0
        self._running: dict[int, int] = {}  # process id -> number
        self._ended: dict[int, int] = {}  # number -> as ``subprocess.Popen.returncode``

    def add(self, pid: int) -> None:
        self._running[pid] = self._count
        self._count += 1
        self._reap()

    def status(self, number: int) -> int | None:
        """None: it still runs, or ended long ago."""
        deadline = time.monotonic() + _SECONDS_TO_END
        self._reap()
        while number in self._running.values() and time.monotonic() < deadline:
            time.sleep(0.001)
            self._reap()
        return self._ended.get(number)

    def _reap(self) -> None:
        """Note who has ended, so that none stays as a zombie."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._ended[self._running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if len(self._ended) > _MOST_STATUSES:
                del self._ended[next(iter(self._ended))]


def _follow(channel: Channel, tokenizer: "LLTokenizer", vocabulary: Vocabulary) -> None:
    """In the forked process: compile a grammar, and answer what generations ask until the other side is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # for what a library writes as it fails
    grammar = None
    try:
        source = GrammarSource(*decoded(channel.receive()))
        _limit_memory(source.num_bytes)
        with ProcessorTime(source.seconds):
            grammar = _Grammar(tokenizer, source)
    except EOFError:
        return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # a panic of the library is no Exception
        failure = f"structured outputs: does not compile: {brief_reason(error)}"
    states: dict[int, _State] = {}
    allowance = _Allowance(source)
    while True:
        try:
            dropped, name, token_ids, drafts = decoded(channel.receive())
        except EOFError:
            return
        for old in dropped:
            states.pop(old, None)
        try:
            if grammar is None:
                raise ValueError(failure)
            allowance.earn(len(token_ids) + len(drafts))
            with allowance:
                if name not in states:
                    states[name] = _State(grammar, vocabulary, allowance)
                if drafts:
                    reply = encode_reply(states[name].after(drafts))
                else:
                    reply = encode_reply(*states[name].accept(token_ids))
        except ValueError as error:
            reply = encode_reply(error=str(error))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # a panic of the library is no Exception
            reply = encode_reply(error=f"structured outputs: {type(error).__name__}: {brief_reason(error)}")
        channel.send(reply)


def _limit_memory(num_bytes: int) -> None:
    status = Path("/proc/self/statm")
    if status.exists():  # elsewhere the address space cannot be limited
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        limit_memory(used + _STACK_BYTES + num_bytes)


class _Allowance(ProcessorTime):
    """For the tokens of all generations of a grammar."""

    def __init__(self, source: GrammarSource) -> None:
        super().__init__(source.seconds_at_once)
        self._source = source

    def earn(self, num_tokens: int) -> None:
        """Time for more tokens of a generation."""
        source = self._source
        self.left = min(self.left + num_tokens * source.seconds_a_token, source.seconds_at_once)


class _Grammar:
    """A compiled grammar, and how to compile it again."""

    def __init__(self, tokenizer: "LLTokenizer", source: GrammarSource) -> None:
        self._tokenizer, self._source, self.seconds = tokenizer, source, source.seconds
        self._text = self._library_text()
        self._first = self._compile()

    def matcher(self, new_lexer: bool = False) -> "LLMatcher":
        """A matcher at the start; ``new_lexer``: with a lexer of its own, which later ones share."""
        if new_lexer:
            self._first = self._compile()
        return self._first.deep_copy()

    def _library_text(self) -> str:
        from llguidance import LLMatcher

        source = self._source
        if source.kind == "json":
            options: Any = dict(source.json_options)
            return LLMatcher.grammar_from_json_schema(source.text, overrides=options)
        return (LLMatcher.grammar_from_regex if source.kind == "regex" else LLMatcher.grammar_from_lark)(source.text)

    def _compile(self) -> "LLMatcher":
        import llguidance

        limits = llguidance.LLParserLimits(**dict(self._source.limits))
        made: list[LLMatcher] = []

        def compile_() -> None:
            made.append(llguidance.LLMatcher(self._tokenizer, self._text, log_level=0, limits=limits))

        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=compile_)
        thread.start()
        thread.join()
        if not made:
            raise ValueError("the library failed")
        matcher = made[0]
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class _State:
    """Where one generation is in its grammar."""

    def __init__(self, grammar: _Grammar, vocabulary: Vocabulary, allowance: _Allowance) -> None:
        self._grammar, self._vocabulary, self._allowance = grammar, vocabulary, allowance
        self._matcher = grammar.matcher()
        self._token_ids: list[int] = []
        self._restarted_at: int | None = None

    def accept(self, token_ids: Collection[int]) -> tuple[bytes, bool]:
        """``token_ids`` were generated. Returns which may follow, int32 [W], and whether none but eos tokens may.

        Raises:
            ValueError: they may not follow, no token may though the text is not complete, or the library's limits are
                reached.
        """
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                self._restart()
                self._matcher.consume_token(token_id)
                self._raise_for_error()
            self._token_ids.append(token_id)
        words = self._compute_words()
        if self._matcher.is_error():
            self._restart()
            words = self._compute_words()
            self._raise_for_error()
        words, finished = self._outcome(words)
        if not words.any():
            raise ValueError(_dead_end(len(self._token_ids)))
        return words.tobytes(), finished

    def after(self, drafts: Sequence[int]) -> bytes:
        """int32 [n, W]: which tokens may follow each of the first n drafts; see ``GrammarState.after``."""
        matcher, found = self._matcher, list[bytes]()
        eos = self._vocabulary.eos_token_ids
        end = next((place for place, token_id in enumerate(drafts) if token_id in eos), len(drafts))
        num_consumed = 0
        for token_id in drafts[: matcher.validate_tokens(list(drafts[:end]))]:
            if not matcher.consume_token(token_id):
                break
            num_consumed += 1
            words, finished = self._outcome(self._compute_words())
            if matcher.is_error() or finished or not words.any():
                break
            found.append(words.tobytes())
        if matcher.is_error() or (num_consumed and not matcher.rollback(num_consumed)) or matcher.is_error():
            self._matcher = self._grammar.matcher()
            self._matcher.consume_tokens(self._token_ids)
        return b"".join(found)

    def _outcome(self, words: np.ndarray) -> tuple[np.ndarray, bool]:
        """Of what the matcher says: which tokens of the model may follow, and whether none but eos tokens may."""
        words &= self._vocabulary.words
        accepting = self._matcher.is_accepting()
        if not accepting:
            words &= ~self._vocabulary.eos_words
        finished = accepting and (self._matcher.is_stopped() or not (words & ~self._vocabulary.eos_words).any())
        return words, bool(finished)

    def _compute_words(self) -> np.ndarray:
        words = np.zeros_like(self._vocabulary.words)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def _restart(self) -> None:
        """Go over the tokens again with a new matcher, if that may help.

        The copies of a matcher share a lexer, whose states only grow in number, so that after many generations it
        may reach its limits though each of them needs little. A generation that needs much restarts only so often.
        """
        place = len(self._token_ids)
        if self._restarted_at is not None and place - self._restarted_at < _TOKENS_BETWEEN_RESTARTS:
            return
        self._allowance.add(self._grammar.seconds)
        self._matcher = self._grammar.matcher(new_lexer=True)
        self._matcher.consume_tokens(self._token_ids)
        self._restarted_at = place

    def _raise_for_error(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            if reason.startswith("NoExtension"):
                raise ValueError(_dead_end(len(self._token_ids)))
            raise ValueError(f"structured outputs: after {len(self._token_ids)} tokens: {brief_reason(reason)}")


def _dead_end(num_tokens: int) -> str:
    return f"structured outputs: after {num_tokens} tokens no token may follow, and the grammar is not matched"
