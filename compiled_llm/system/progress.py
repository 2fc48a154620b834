"""What a start is doing, on stderr: a bar on a terminal, plain lines elsewhere, nothing where silence was asked for.

A start takes seconds when it finds what an earlier one left on disk, and minutes when it does not. So every stage has a
bar, which goes when the stage is done; several stages may be at work at once. Lines are for logs: two for a stage that
takes long, one when all is ready. A start that makes something says once where that is kept, and how to make it ahead.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TextIO

from tqdm import tqdm

Mode = Literal["auto", "bar", "lines", "off"]
_REFRESH_SECONDS = 1.0
_TRUST = 0.25  # in experience: as much as in this share of a stage's own time
_LINE_SECONDS = 30.0  # between the lines of a stage that goes on and on


class Stage:
    """One stage at work. The items may be finished in any order, and from any thread.

    Args:
        weights: how long each item takes, by its name, in any unit: what is left follows from what is done.
        seconds: what the stage takes by experience; shown until some items are done, which tell more. None: unknown.
        plan: when each item should be done by experience, seconds after the start: for items that run side by side,
            of which the weights tell less. It takes the place of ``seconds``.
        foreseen: whether the weights are known. If they are guesses, nothing is said of what is left.
        in_bytes: the weights are bytes, which are shown instead of items.
    """

    def __init__(
        self,
        name: str,
        weights: Mapping[str, float],
        seconds: float | None = None,
        in_bytes: bool = False,
        plan: Mapping[str, float] | None = None,
        foreseen: bool = True,
    ) -> None:
        self.name = name
        self._plan, self._foreseen = plan, foreseen
        self._in_bytes = in_bytes
        self._parts: dict[str, float] = {}  # of items that are at work, how much of their weight is done
        self._lock = threading.Lock()
        self._weights = dict(weights)
        self._seconds = seconds if plan is None else max(plan.values(), default=0.0)
        self._running: list[str] = []
        self._done: list[str] = []
        self._started = time.monotonic()
        self._last_change = self._started

    def begin(self, item: str) -> None:
        """Work on ``item`` starts, beside the items that are unfinished."""
        self._running = [*self._running, item]

    def advance(self, item: str, amount: float) -> None:
        """So much more of the weight of ``item`` is done; it is finished when all of it is."""
        with self._lock:
            self._parts = {**self._parts, item: self._parts.get(item, 0.0) + amount}
            is_whole = self._parts[item] >= self._weights[item]
        if is_whole:
            self.finish(item)
        self._last_change = time.monotonic()

    def finish(self, item: str) -> None:
        with self._lock:
            self._running = [name for name in self._running if name != item]
            self._done = [*self._done, item]
            self._parts = {name: part for name, part in self._parts.items() if name != item}
        self._last_change = time.monotonic()

    def next(self, item: str) -> None:
        """Work on ``item`` starts, and what was at work is finished: for items that run one after the other."""
        for name in self._running:
            self.finish(name)
        self.begin(item)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def share(self) -> float:
        """How much of the work is done: 0 to 1."""
        whole = sum(self._weights.values())
        return min(1.0, self._amount() / whole) if whole else 1.0

    def _amount(self) -> float:
        return sum(self._weights.get(name, 0.0) for name in self._done) + sum(self._parts.values())

    def remaining(self) -> float | None:
        """Seconds that are left, as far as anyone can tell: by experience at first, then more and more by what is done.

        The first item often pays for what is done once, so it alone is not believed.
        """
        share, spent = self.share, self._last_change - self._started
        if not self._foreseen or (self._seconds is None and not share):
            return None
        if self._seconds is None:
            whole = spent / share
        else:
            planned = self._planned(share, self._seconds)
            slower = (spent + _TRUST * self._seconds) / max(planned + _TRUST * self._seconds, 1e-9)
            whole = spent + slower * (self._seconds - planned)
        return max(0.0, whole - self.elapsed)

    def _planned(self, share: float, seconds: float) -> float:
        """When what is done should have been done."""
        if self._plan is None:
            return share * seconds
        return max((self._plan.get(name, 0.0) for name in self._done), default=0.0)

    def head(self) -> str:
        if self._in_bytes:
            whole = sum(self._weights.values())
            unit, name = (1e9, "GB") if whole >= 1e9 else (1e6, "MB")
            return f"{self.name} {self._amount() / unit:.2f}/{whole / unit:.2f} {name}"
        return f"{self.name} {len(self._done)}/{len(self._weights)}"

    def state(self) -> str:
        left = self.remaining()
        about = f"about {left:.0f} s left" if left is not None and left >= 1 else ""
        return ", ".join(filter(None, [*self._running[:3], f"{self.elapsed:.0f} s", about]))


class StartProgress:
    """Shows the stages of one start.

    Args:
        mode: "auto" is a bar where ``stream`` is a terminal, else lines; "off" prints nothing.
        stream: where it goes; None is stderr as it is now.
    """

    def __init__(self, mode: Mode = "off", stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        if self._stream is None:  # a process without a console
            mode = "off"
        self._mode = mode if mode != "auto" else "bar" if _shows_bars(self._stream) else "lines"
        self._advice = ""

    def advise(self, text: str) -> None:
        """A line for the first stage that takes long: what a user should know who waits for it."""
        self._advice = text

    @contextlib.contextmanager
    def stage(
        self,
        name: str,
        weights: Mapping[str, float],
        *,
        seconds: float | None = None,
        plan: Mapping[str, float] | None = None,
        foreseen: bool = True,
        is_long: bool = True,
        found: int = 0,
        in_bytes: bool = False,
    ) -> Iterator[Stage]:
        """Show a stage while the block runs.

        Args:
            weights, seconds, plan, foreseen, in_bytes: as ``Stage`` takes them.
            is_long: it deserves lines of its own in a log.
            found: how many more there would be, if they were not on disk already.
        """
        stage = Stage(name, weights, seconds, in_bytes, plan, foreseen)
        expected = stage.remaining()
        if self._mode == "off" or not weights:
            yield stage
            return
        if is_long and self._advice:
            advice, self._advice = self._advice, ""
            self.line(advice)
        if self._mode == "lines":
            if is_long:
                names = ", ".join(weights) if len(weights) <= 4 else f"{next(iter(weights))} and others"
                known = f", {found} more found on disk" if found else ""
                about = "" if expected is None else f", about {expected:.0f} s"
                self.line(f"{name}: {len(weights)} ({names}){known}{about}")
            with _every(_LINE_SECONDS, lambda: self.line(f"{stage.head()}: {stage.state()}")):
                yield stage
            if is_long:
                self.line(f"{name}: {len(weights)} done in {stage.elapsed:.1f} s")
            return
        with _bar(stage, self._stream) as show, _every(_REFRESH_SECONDS, show):
            yield stage

    def line(self, text: str) -> None:
        """A line that stays, unless silence was asked for. A stderr that is closed or full stops no engine."""
        if self._mode != "off":
            # The bars of stages that are at work are drawn again below the line.
            above = tqdm.external_write_mode(self._stream) if self._mode == "bar" else contextlib.nullcontext()
            with contextlib.suppress(OSError, ValueError), above:
                print(f"compiled-llm: {text}", file=self._stream, flush=True)


def _shows_bars(stream: TextIO) -> bool:
    """Whether it is a terminal; one that says it is 0 wide, as without anybody who looks, would get empty bars."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no size is known
        return stream.isatty()


@contextlib.contextmanager
def _bar(stage: Stage, stream: TextIO) -> Iterator[Any]:
    """A bar for ``stage``; yields what draws it as it is now."""
    # The text at the end is the "unit": before a postfix there would be a comma.
    look: dict[str, Any] = {"bar_format": "{desc} |{bar:20}| {unit}", "leave": False, "file": stream}
    with tqdm(total=1.0, desc=stage.head(), unit=stage.state(), **look) as bar:

        def show() -> None:
            bar.n = stage.share
            bar.set_description_str(stage.head(), refresh=False)
            bar.unit = stage.state()
            bar.refresh()

        yield show


@contextlib.contextmanager
def _every(seconds: float, call: Any) -> Iterator[None]:
    """Call ``call`` again and again while the block runs, however long one item of it takes."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=run, name="start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
