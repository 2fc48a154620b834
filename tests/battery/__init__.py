"""Slow tests of what must never break, by many random cases: ``pytest -m battery`` runs them at full size.

The ordinary run has the same bodies at a small size. A battery is parametrized by its size, and marks the full one:

    @sized("num_schedules", 20, 2000)

Each counts what happened in it, through the fixture ``battery_counts``, and asserts that what it is about did happen.
The counts are printed at the end of the run.
"""

from typing import Any

import pytest


def sized(names: str | tuple[str, ...], small: Any, full: Any) -> pytest.MarkDecorator:
    """A test of two sizes, "small" and "full"; of several ``names`` each has a tuple of values."""
    small, full = ((size,) if isinstance(names, str) else size for size in (small, full))
    cases = [pytest.param(*small, id="small"), pytest.param(*full, id="full", marks=pytest.mark.battery)]
    return pytest.mark.parametrize(names, cases)
