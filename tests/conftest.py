"""Fixtures and hooks shared by all tests."""

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Set before the libraries are imported: no forks of a threaded tokenizer, no network.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Bytecode is kept, also where the environment says otherwise (images of containers do): a hundred processes import
# the package, and each would compile it again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False

import pytest
import torch

from tests.processes import build_kernels, num_processes
from tests.scripted_server import Script, starting_scripts

# The one compiles the graphs that many files then find in the cache; the other takes about as long, without that cache.
_FIRST = ("tests/docs/test_commands.py", "tests/compiling/test_function.py")
_COUNTS = "battery counts"  # a user property of a report
_MOST_FILES = 10
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the tests in a process per core (pytest-xdist), unless ``-n`` is given or a single file is asked for.

    The tests of a file run in one process and in their order, so that they share the file's fixtures.
    """
    option = config.option
    if _IS_WORKER or not config.pluginmanager.hasplugin("xdist"):
        return
    if option.numprocesses is not None or option.tx:
        if option.numprocesses != 0:
            _spare_cores()
        return
    paths = [Path(arg.split("::")[0]) for arg in config.args]
    is_one_file = len(paths) == 1 and paths[0].is_file()
    if is_one_file or option.collectonly or option.usepdb or option.capture == "no" or num_processes() == 1:
        return
    option.numprocesses, option.dist = num_processes(), "loadfile"
    option.loadscopereorder = False  # as pytest_collection_modifyitems orders them
    _spare_cores()
    if any((path / "ops").is_dir() for path in paths):  # all rooms
        build_kernels(every_set="battery" in option.markexpr)


def _spare_cores() -> None:
    """Read by the processes that xdist starts: one thread each, which does not spin while it waits for a core."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")):
        os.environ.setdefault(name, value)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported: nearly everything that a collection would look at stays
    if _IS_WORKER and not any("::" in arg for arg in config.args):
        config.args = _in_turns(config.args)
    config.pluginmanager.register(_Summary())
    if not torch.cuda.is_available():
        config.pluginmanager.register(_WithoutGpu())


def _in_turns(args: list[str]) -> list[str]:
    """The files and folders in which a process looks for tests, from another one on in each process.

    In a new checkout pytest rewrites the assertions of each file and keeps what it gets, which takes half a minute. So
    each process rewrites its share, and finds that of the others.
    """
    parts: list[str] = []
    for path in map(Path, args):
        below = sorted(path.iterdir()) if path.is_dir() else []
        found = [one for one in below if one.name.startswith("test_") or (one.is_dir() and one.name[0] not in "._")]
        parts += map(str, found or [path])
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = len(parts) * number // count
    return parts[first:] + parts[:first]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Full-size batteries run only where they are asked for: pytest -m battery
    if "battery" not in config.getoption("markexpr"):
        full_size = [item for item in items if item.get_closest_marker("battery")]
        config.hook.pytest_deselected(items=full_size)
        items[:] = [item for item in items if not item.get_closest_marker("battery")]
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, str]:
    """That of its file; in a process of several the same in each."""
    path = item.nodeid.split("::")[0]
    return [*_FIRST, path].index(path), path if _IS_WORKER else ""


def pytest_collection_finish() -> None:
    """From here on the garbage collector passes over what is imported, which takes it half a second each time.

    And it looks less often at what tests make, which takes 8% of the time of those that serve.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain at the end of what is left of them
    gc.set_threshold(50_000)
    gc.enable()


class _WithoutGpu:
    """Skips what needs a GPU: the first test of a file, and says of how many. To skip a thousand takes seconds."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        of_files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            if "gpu" in item.keywords:
                of_files.setdefault(item.path, []).append(item)
        others: list[pytest.Item] = []
        for first, *more in of_files.values():
            first.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU, as do {len(more)} more of this file"))
            others += more
        config.hook.pytest_deselected(items=others)
        gone = {*map(id, others)}
        items[:] = [item for item in items if id(item) not in gone]


class _Summary:
    """What the end of the run shows. All of it is read from reports, which xdist brings from the other processes."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()  # of each file
        self.counts: dict[str, dict[str, int]] = {}  # of each battery

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        for name, value in report.user_properties:
            if name == _COUNTS:
                self.counts[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.counts:
            terminalreporter.section("battery counts")
        for name, counts in self.counts.items():
            terminalreporter.write_line(f"{name}: " + ", ".join(f"{what} {count:,}" for what, count in counts.items()))
        if self.seconds:
            slowest = [f"{name} {seconds:.0f} s" for name, seconds in self.seconds.most_common(_MOST_FILES)]
            terminalreporter.write_line(f"slowest files, of {sum(self.seconds.values()):.0f} s: " + ", ".join(slowest))


@pytest.fixture(scope="module")
def without_garbage_collection() -> Iterator[None]:
    """For tests that make millions of objects and keep them: to look for garbage among them takes the longest."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def battery_counts(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What a battery counts while it runs, such as schedules and preemptions; shown at the end of the run."""
    counts: Counter[str] = Counter()
    yield counts
    request.node.user_properties.append((_COUNTS, dict(counts)))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # Without a GPU torch.manual_seed takes three tracebacks, for the day when one is initialised: 2 ms a test.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the run was started in the background, which ignores it.

    After a test SIGINT and SIGTERM do again what they did before.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    """Makes servers that answer as they are told."""
    with starting_scripts() as make:
        yield make
