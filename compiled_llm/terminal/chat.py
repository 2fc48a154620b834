"""A chat in a terminal: lines of the user, commands among them, and answers; or a script of lines from a pipe."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from compiled_llm.api.command_line import sampling_value
from compiled_llm.api.names import did_you_mean
from compiled_llm.terminal.conversation import Conversation

_PROMPT, _PROMPT_OF_MORE = "> ", "... "


class _Command(NamedTuple):
    """``argument``: what follows its name, for ``/help``; in brackets if it may be left out."""

    run: Callable[["Chat", str], None]
    argument: str
    text: str


class Chat:
    """Reads lines until their end, answers them, and runs those that begin with ``/``.

    On a terminal Ctrl-C ends the answer alone; at the prompt, given twice, it leaves, as Ctrl-D does.

    Args:
        without: sampling parameters that have no effect here.
    """

    def __init__(self, conversation: Conversation, without: Sequence[str]) -> None:
        self._conversation, self._without = conversation, without
        self._has_failed = self._leaves = False

    def run(self) -> int:
        """Returns the exit status: 0; 1 where a line of a script could not be answered."""
        is_terminal = sys.stdin.isatty()
        with _python_interrupts() if is_terminal else contextlib.nullcontext():
            for line in _terminal_lines() if is_terminal else _script_lines():
                try:
                    self._take(line)
                except BrokenPipeError:
                    break
                except KeyboardInterrupt as interrupt:  # before an answer began, or in a command
                    if interrupt.args:
                        raise
                    _tell("stopped")
                except (ValueError, OSError) as error:
                    self._has_failed = True
                    _tell(f"error: {error}")
                if self._leaves:
                    break
        return 1 if self._has_failed and not is_terminal else 0

    def _take(self, line: str) -> None:
        if not line.startswith("/"):
            _tell(self._conversation.say(line))
            return
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            hint = did_you_mean(f"/{name}", (f"/{each}" for each in COMMANDS))
            raise ValueError(f"there is no command /{name:.100}: {hint or '/help lists them'}")
        command, argument = COMMANDS[name], argument.strip()
        if not argument and command.argument and not command.argument.startswith("["):
            raise ValueError(f"/{name} needs {command.argument}")
        if argument and not command.argument:
            raise ValueError(f"/{name} stands alone, given {argument!r:.100}")
        command.run(self, argument)

    def _help(self, argument: str) -> None:
        rows = [(f"/{name} {command.argument}".rstrip(), command.text) for name, command in COMMANDS.items()]
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"{name:{width}}  {text}")
        print("A line that ends in \\ goes on in the next one. Ctrl-C ends an answer, Ctrl-D leaves.")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            for each, value in self._conversation.sampling.items():
                print(f"{each} {value}")
        elif not text:
            raise ValueError("/set needs NAME VALUE, as in /set temperature 0.2")
        else:
            self._conversation.set(name.replace("-", "_"), sampling_value(name, text.strip(), self._without))

    def _system(self, argument: str) -> None:
        if not argument:
            print("none" if self._conversation.system is None else self._conversation.system)
        else:
            self._conversation.system = None if argument == "none" else argument

    def _clear(self, argument: str) -> None:
        self._conversation.messages.clear()

    def _retry(self, argument: str) -> None:
        _tell(self._conversation.retry())

    def _stats(self, argument: str) -> None:
        conversation = self._conversation
        rows = {
            "last answer": "none" if conversation.last is None else conversation.last.summary,
            "conversation": f"{len(conversation.messages)} messages, {conversation.size()}",
            **conversation.facts(),
        }
        width = max(map(len, rows))
        for name, text in rows.items():
            print(f"{name:{width}}  {text}")
        for line in conversation.notes():
            print(line)

    def _save(self, argument: str) -> None:
        path = Path(argument).expanduser()
        try:
            self._conversation.save(path)
        except FileExistsError:
            raise ValueError(f"/save needs the name of a new file, and {path} is there") from None
        print(f"{len(self._conversation.messages)} messages in {path}")

    def _exit(self, argument: str) -> None:
        self._leaves = True


COMMANDS = {
    "help": _Command(Chat._help, "", "these commands"),
    "set": _Command(
        Chat._set, "[NAME VALUE]", "change how answers are sampled, as in /set temperature 0.2; alone: show it"
    ),
    "system": _Command(Chat._system, "[TEXT]", "what the model is told before all else; none: nothing; alone: show it"),
    "clear": _Command(Chat._clear, "", "forget what was said; the system message and settings stay"),
    "retry": _Command(Chat._retry, "", "answer the last message again"),
    "stats": _Command(Chat._stats, "", "tokens, times, and what the prefix cache spared"),
    "save": _Command(Chat._save, "FILE", "write the conversation, as a row for compiled-llm batch"),
    "exit": _Command(Chat._exit, "", "leave"),
}


def _tell(note: str | None) -> None:
    if note is not None:
        print(f"({note})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _python_interrupts() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` each time, unless the program was started with SIGINT ignored.

    That one has no arguments. Those of ``StopSignals`` have the signal's number, and end the program.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _script_lines() -> Iterator[str]:
    """Lines of standard input that are not empty; one that ends in a backslash goes on in the next."""
    parts: list[str] = []
    for line in sys.stdin:
        parts.append(line.rstrip("\n"))
        if not parts[-1].endswith("\\"):
            if text := _joined(parts):
                yield text
            parts = []
    if text := _joined(parts):
        yield text


def _terminal_lines() -> Iterator[str]:
    """Lines that the user types at a prompt, with Python's line editing, until Ctrl-D or two Ctrl-C."""
    _prepare_editing()
    is_leaving = False
    parts: list[str] = []
    while True:
        try:
            parts.append(input(_PROMPT_OF_MORE if parts else _PROMPT))
        except EOFError:
            print()
            return
        except KeyboardInterrupt as interrupt:
            print()
            if interrupt.args:
                raise
            if is_leaving:
                return
            is_leaving, parts = True, []
            _tell("Ctrl-C again or Ctrl-D leaves")
            continue
        is_leaving = False
        if not parts[-1].endswith("\\"):
            if text := _joined(parts):
                yield text
            parts = []


def _joined(parts: Sequence[str]) -> str:
    return "\n".join([*(part[:-1] for part in parts[:-1]), *parts[-1:]]).strip()


def _prepare_editing() -> None:
    """Line editing, the history of this chat, and completion of the commands."""
    try:
        import readline
    except ImportError:  # a Python without it: lines are typed without editing
        return

    def complete(word: str, number: int) -> str | None:
        found = [f"/{name}" for name in COMMANDS if f"/{name}".startswith(word)] if word.startswith("/") else []
        return found[number] if number < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
