"""A program from its start to its exit status: what signals and a closed stdout mean for it."""

import contextlib
import signal
import sys
from collections.abc import Callable

from compiled_llm.system.process import GuardedStream, StopSignals

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE


def run_program(program: str, run: Callable[[GuardedStream, StopSignals], int]) -> int:
    """Call ``run`` with stdout and the signals that end programs; returns the exit status.

    It is what ``run`` returns; 128 + the signal's number after SIGINT (130) or SIGTERM (143); 141 when stdout was
    closed, as by ``| head``; 1 when something could not be read or written. Each but the one for a closed stdout is
    told on stderr in a line that begins with ``program``.
    """
    with (
        contextlib.redirect_stdout(GuardedStream(sys.stdout)) as stdout,
        contextlib.redirect_stderr(GuardedStream(sys.stderr)),
    ):
        try:
            with StopSignals() as signals:
                status = run(stdout, signals)
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
