"""Slow tests of what must never break, by many random cases: ``pytest -m battery`` runs them at full size.

The ordinary run has the same bodies at a small size. A battery is parametrized by its size and marks the full one:

    SIZES = [pytest.param(20, id="small"), pytest.param(2000, id="full", marks=pytest.mark.battery)]

Each counts what happened in it, through the fixture ``battery_counts``, and asserts that what it is about did happen.
The counts are printed at the end of the run.
"""
