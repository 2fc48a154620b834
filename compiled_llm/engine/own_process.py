"""An engine belongs to the process that made it. A fork of that one has its memory, and nothing that works for it."""

import os


class OwnProcess:
    """The process in which this object was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this_one(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """``RuntimeError`` in any other."""
        if not self.is_this_one:
            raise RuntimeError(
                f"the engine was made in process {self._pid}, and this is process {os.getpid()}, a fork of it, which "
                "has none of its threads: start the process by multiprocessing.get_context('spawn') and make the "
                "engine there, or fork before torch has computed anything, and make the engine in the fork"
            )
