"""A program from its start to its exit status: what signals and a closed stdout mean for it."""

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Sequence

from compiled_llm.system.process import GuardedStream, StopSignals

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE


Main = Callable[[str, Sequence[str] | None, GuardedStream, StopSignals], int]


def as_program(main: Main) -> Callable[..., int]:
    """A command's ``main(program, arguments=None)``, of one that gets stdout and the signals that end programs besides.

    The exit status is what ``main`` returns; 128 + the signal's number after SIGINT (130) or SIGTERM (143); 141 when
    stdout was closed, as by ``| head``; 1 when something could not be read or written. Each but the one for a closed
    stdout is told on stderr in a line that begins with ``program``.
    """

    @functools.wraps(main)
    def started(program: str, arguments: Sequence[str] | None = None) -> int:
        with (
            contextlib.redirect_stdout(GuardedStream(sys.stdout)) as stdout,
            contextlib.redirect_stderr(GuardedStream(sys.stderr)),
        ):
            try:
                with StopSignals() as signals:
                    status = main(program, arguments, stdout, signals)
            except KeyboardInterrupt as interrupt:
                number = signal.Signals(interrupt.args[0] if interrupt.args else signal.SIGINT)
                print(f"{program}: stopped by {number.name}", file=sys.stderr)
                return 128 + number
            except OSError as error:
                print(f"{program}: error: {error}", file=sys.stderr)
                return 1
            finally:
                stdout.flush()  # here, where its failure is dealt with
            if isinstance(stdout.failure, BrokenPipeError):
                return BROKEN_PIPE_STATUS
            if stdout.failure is not None:
                print(f"{program}: error: stdout: {stdout.failure.strerror}", file=sys.stderr)
                return 1
        return status

    return started
