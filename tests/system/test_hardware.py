"""What a result says of its machine."""

import sys
from pathlib import Path

import pytest
import torch

from compiled_llm.system import hardware


def test_the_command_has_no_path_from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that a result may be kept in the repository."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["--python", f"{tmp_path}/peers/bin/python", f"--json={tmp_path}/here/out.json", "--repeats", "3"]
    words += ["--args", '{"a": "b=/c"}']
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "run.py"), *words])
    command = hardware.describe(torch.device("cpu"))["command"]
    expected = 'python ../run.py --python ../peers/bin/python --json=out.json --repeats 3 --args \'{"a": "b=/c"}\''
    assert command == expected


def test_a_processor_is_named_with_its_family_and_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"model name": "AMD EPYC", "cpu family": "26", "model": "2", "flags": "fpu avx2 avx512_bf16"}
    monkeypatch.setattr(hardware, "_cpu_facts", lambda: facts)
    cpu = torch.device("cpu")
    assert hardware.describe(cpu)["cpu"] == "AMD EPYC (cpu family 26, model 2) avx2 avx512_bf16"
    monkeypatch.setattr(hardware, "_cpu_facts", lambda: {"model name": "x", "Features": "asimddp fp"})
    assert hardware.describe(cpu)["cpu"] == "x asimddp"
