"""B11: hostile model directories. Each ends in a clear error that names the file, or in a model that serves.

In eight seconds, and in less than a gigabyte; nothing of a directory is executed. Where a tensor is spoilt, it is
named.
"""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.battery import bad_experts, bad_models, bad_names, bad_quantized

MOST_SECONDS = 8  # of work, or of waiting; more than that of both is a busy machine. An intact model may take 4 to 5
MOST_BYTES = 1 << 30
ROOT = Path(__file__).parents[2]
# Why a request may fail on a model that was loaded: the others are served.
REASONS = ("logits are not finite", "the tokenizer cannot", "prompt_token_ids must be integers from 0 to 63")
_CASES = 200  # of a process


def outcomes(names: dict[str, bad_models.Spoil], directory: Path) -> dict[str, dict[str, Any]]:
    """Name -> what ``try_models.py`` says of the directory."""
    for kind in {*map(bad_models.kind_of, names)}:
        bad_models.make_good(directory / kind, kind)
        bad_models.plant_code(directory / kind, directory / "executed")
    found: dict[str, dict[str, Any]] = {}
    waiting = list(names)
    while waiting:
        for name in _run(waiting[:_CASES], names, directory, found):
            waiting.remove(name)
    return found


def _run(
    names: list[str], spoils: dict[str, bad_models.Spoil], directory: Path, found: dict[str, dict[str, Any]]
) -> list[str]:
    """Try some cases in one process; returns those that it got to. A case that ends the process is the last of them."""
    command = [sys.executable, "-m", "tests.battery.try_models"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    done = []
    with open(directory / "stderr", "w+") as errors, subprocess.Popen(command, stderr=errors, **pipes) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for name in names:
            case = directory / "case"
            shutil.copytree(directory / bad_models.kind_of(name), case)
            spoils[name](case)
            child.stdin.write(f"{case}\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            found[name] = json.loads(answer) if answer else {"error": "the process ended", "message": _end(errors)}
            found[name]["executed"] = (directory / "executed").exists()
            shutil.rmtree(case)
            done.append(name)
            if not answer:
                break
        child.stdin.close()
    return done


def _end(file: TextIO) -> str:
    file.seek(0)
    return file.read()[-500:]


def complaint(name: str, outcome: dict[str, Any]) -> str | None:
    """What is wrong with the outcome of the case ``name``."""
    must_name = bad_names.must_name(name) or bad_experts.must_name(name) or bad_quantized.must_name(name)
    if outcome["executed"]:
        return "code of the directory was executed"
    if name in bad_names.SERVED and "error" in outcome:
        return f"is no corruption, and yet {outcome['error']}: {outcome['message']:.300}"
    if "error" in outcome:
        # A clear error is a ValueError that names a file of the directory, or at least the directory.
        named = any(word in outcome["message"] for word in (".json", ".safetensors", ".jinja", "/case:"))
        if outcome["error"] not in ("ValueError", "CheckpointError") or not named:
            return f"{outcome['error']}: {outcome['message']:.300}"
        if not all(word in outcome["message"] for word in must_name):
            return f"does not name {must_name}: {outcome['message']:.300}"
        if len(outcome["message"]) > 4000:
            return f"a message of {len(outcome['message'])} characters"
    elif must_name:
        return f"served, though {must_name} is spoilt"
    elif any(reason == "error" and not any(word in why for word in REASONS) for reason, why in outcome["served"]):
        return f"served, and then {outcome['served']}"
    if "seconds" in outcome and outcome["seconds"] > MOST_SECONDS and outcome["cpu_seconds"] > MOST_SECONDS:
        return f"took {outcome['seconds']:.1f} s"
    if "seconds" in outcome and outcome["seconds"] > 10 * MOST_SECONDS:
        return f"waited {outcome['seconds']:.1f} s"
    if outcome.get("bytes", 0) > MOST_BYTES:
        return f"took {outcome['bytes'] >> 20} MiB"
    return None


GOOD: dict[str, bad_models.Spoil] = {
    f"{kind}nothing": lambda _: None for kind in ("", "index ", "experts ", "mxfp4 ", "quantised ")
}
SIZES = [
    pytest.param(2, {"nothing"}, 1, id="small"),
    pytest.param(None, {*GOOD}, 500, id="full", marks=pytest.mark.battery),
]


@pytest.mark.parametrize(("num_cases", "good", "num_flips"), SIZES)
def test_bad_models(
    num_cases: int | None, good: set[str], num_flips: int, tmp_path: Path, battery_counts: Counter[str]
) -> None:
    """``num_cases``: hostile directories, None for all of them."""
    cases = bad_models.cases()
    if num_cases is not None:
        cases = {name: cases[name] for name in random.Random(1).sample(sorted(cases), num_cases)}
    intact = {name: GOOD[name] for name in good}
    found = outcomes(intact | cases | bad_models.flips(num_flips), tmp_path)
    for outcome in found.values():
        battery_counts["refused" if "error" in outcome else "served"] += 1
    battery_counts["longest, ms"] = round(1000 * max(outcome.get("cpu_seconds", 0) for outcome in found.values()))
    battery_counts["largest, MiB"] = max(outcome.get("bytes", 0) for outcome in found.values()) >> 20
    complaints = {name: text for name, outcome in found.items() if (text := complaint(name, outcome))}
    assert not complaints, "\n".join(f"{name}: {text}" for name, text in complaints.items())
    assert battery_counts["refused"] > 0
    for name in good:
        assert found[name]["served"] == [["length", "None"]] * 2
