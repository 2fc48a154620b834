"""compare_speed: a checkout against itself."""

import re
import subprocess
import sys

import pytest

from tests.battery.turns import ROOT


@pytest.mark.battery
def test_a_checkout_against_itself() -> None:
    flags = ["--rounds", "1", "--workloads", "W3", "--shape", "tiny", "--engine-args", '{"enforce_eager": true}']
    command = [sys.executable, "-m", "tests.battery.compare_speed", str(ROOT), *flags]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = r"W3: N s before, N s now, ratio N; host N and N us a step; tokens the same\n"
    assert re.fullmatch(expected.replace("N", r"\d+(\.\d+)?"), printed)
