"""gpu_validate, as far as it goes without a GPU: its parts are commands that their scripts understand."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compiled_llm.command_line import FlagParser

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_validate = load(ROOT / "scripts" / "gpu_validate.py")


class Parsed(Exception):
    """A script's arguments were parsed: what it would do with them is not tried."""


@pytest.mark.parametrize("part", gpu_validate.PARTS)
def test_a_part_is_a_command_that_its_script_understands(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, command = gpu_validate.PARTS[part]
    script, *arguments = command.format(json=tmp_path / "out.json", folder=tmp_path / "out").split()
    if script == "-m":
        assert [name for name in arguments if name.startswith("tests/") and not (ROOT / name).is_file()] == []
        return
    parse = argparse.ArgumentParser.parse_known_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        _, unknown = parse(self, *args, **kwargs)
        assert unknown == []
        raise Parsed

    for parser in (argparse.ArgumentParser, FlagParser):
        monkeypatch.setattr(parser, "parse_args", parse_args)
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(Parsed):
        load(ROOT / script).main()


def test_a_part_leaves_its_result_its_log_and_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.py"
    good.write_text("import json, sys; print('hello'); print(json.dumps({'arguments': sys.argv[1:]}))")
    bad = tmp_path / "bad.py"
    bad.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"half\": 1}'); sys.exit(3)")
    monkeypatch.setattr(
        gpu_validate, "PARTS", {"good": (60, f"{good} --json {{json}} {{folder}}"), "bad": (60, f"{bad} {{json}}")}
    )
    for name in ("good", "bad"):
        gpu_validate.run_part(name, tmp_path, 60)
    records = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("good", "bad")}
    assert records["good"]["status"] == 0
    arguments = ["--json", str(tmp_path / "good.json"), str(tmp_path / "good")]
    assert records["good"]["result"] == {"arguments": arguments}
    assert (records["bad"]["status"], records["bad"]["result"]) == (3, {"half": 1})
    assert (gpu_validate.passed("good", tmp_path), gpu_validate.passed("bad", tmp_path)) == (True, False)
    assert not gpu_validate.passed("neither", tmp_path)
    assert "hello" in (tmp_path / "good.log").read_text()
    assert "FAILED (3)" in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu_validate, "PARTS", {"slow": (60, str(slow))})
    record = gpu_validate.run_part("slow", tmp_path, 0.5)
    assert (record["status"], gpu_validate.passed("slow", tmp_path)) == (124, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_validate.py"])
    assert gpu_validate.main() == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_parts_that_do_not_fit_are_left_out_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ok.py").write_text("print('{}')")
    script = str(tmp_path / "ok.py")
    monkeypatch.setattr(gpu_validate, "PARTS", {"long": (300, script), "short": (60, script)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_validate.machine, "describe", lambda device: {"gpu": "none"})
    for budget, status, said in (("100", 1, "long         left out"), ("1000", 0, "1 of 1 parts passed")):
        arguments = ["--output", str(tmp_path / "out"), "--budget", budget, "--resume"]
        monkeypatch.setattr(sys, "argv", ["gpu_validate.py", *arguments])
        assert gpu_validate.main() == status
        assert said in capsys.readouterr().out
    assert all(gpu_validate.passed(name, tmp_path / "out") for name in ("long", "short"))
