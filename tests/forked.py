"""A fork of the test's process, for what must not reach the parent from there."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable


def in_fork(work: Callable[[], object]) -> int:
    """Call ``work`` in a fork, which then ends at once. Returns its exit status: 0 if nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads run
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)
