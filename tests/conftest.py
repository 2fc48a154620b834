"""Fixtures and hooks shared by all tests."""

import os
import signal
from collections import Counter
from collections.abc import Iterator

# Set before the libraries are imported: no forks of a threaded tokenizer, no network.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

_BATTERY_COUNTS = pytest.StashKey[dict[str, Counter[str]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
    # Full-size batteries run only where they are asked for: pytest -m battery
    if "battery" not in config.getoption("markexpr"):
        full_size = [item for item in items if item.get_closest_marker("battery")]
        config.hook.pytest_deselected(items=full_size)
        items[:] = [item for item in items if item not in full_size]


@pytest.fixture
def battery_counts(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What a battery counts while it runs, such as schedules and preemptions; shown at the end of the run."""
    counts: Counter[str] = Counter()
    yield counts
    request.config.stash.setdefault(_BATTERY_COUNTS, {})[request.node.nodeid] = counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts_of = config.stash.get(_BATTERY_COUNTS, {})
    if counts_of:
        terminalreporter.section("battery counts")
    for name, counts in counts_of.items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{what} {count:,}" for what, count in counts.items()))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the run was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
