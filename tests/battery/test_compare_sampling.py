"""compare_sampling: a checkout against itself."""

import re
import subprocess
import sys

import pytest

from tests.battery.turns import ROOT


@pytest.mark.battery
def test_a_checkout_against_itself() -> None:
    flags = ["--rounds", "2", "--rows", "2", "--vocabularies", "300", "--patterns", "peaked", "--threads", "1"]
    command = [sys.executable, "-m", "tests.battery.compare_sampling", str(ROOT), *flags]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    *rows, least = printed.splitlines()
    assert len(rows) == 7
    for row in rows:
        assert re.fullmatch(r"peaked +300 x  2 \S+ +[\d.]+ us before, +[\d.]+ us now, ratio [\d.]+", row), row
    assert re.fullmatch(r"the least ratio: [\d.]+", least)
