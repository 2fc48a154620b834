"""gpu_validate, as far as it goes without a GPU: its parts are commands that their scripts understand."""

import argparse
import importlib.util
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compiled_llm.api.command_line import FlagParser

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    """A program as a module, with the files beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        return _load(path)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_validate = load(ROOT / "scripts" / "gpu_validate.py")
Part = sys.modules["gpu_parts"].Part


class Parsed(Exception):
    """A script's arguments were parsed: what it would do with them is not tried."""


@pytest.mark.parametrize("part", gpu_validate.PARTS)
def test_a_part_is_a_command_that_its_script_understands(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *arguments = (
        gpu_validate.PARTS[part].command.format(json=tmp_path / "out.json", folder=tmp_path / "out").split()
    )
    if script == "-m" and arguments[0] == "pytest":
        assert [name for name in arguments if name.startswith("tests/") and not (ROOT / name).is_file()] == []
        return
    parse = argparse.ArgumentParser.parse_known_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        _, unknown = parse(self, *args, **kwargs)
        assert unknown == []
        raise Parsed

    for parser in (argparse.ArgumentParser, FlagParser):
        monkeypatch.setattr(parser, "parse_args", parse_args)
    if script == "-m":
        assert arguments.pop(0) == "compiled_llm"
        script = "compiled_llm/__main__.py"
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def test_a_part_leaves_its_result_its_log_and_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.py"
    good.write_text("import json, sys; print('hello'); print(json.dumps({'arguments': sys.argv[1:]}))")
    bad = tmp_path / "bad.py"
    bad.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"half\": 1}'); sys.exit(3)")
    monkeypatch.setattr(
        gpu_validate,
        "PARTS",
        {"good": Part(60, f"{good} --json {{json}} {{folder}}"), "bad": Part(60, f"{bad} {{json}}")},
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
    monkeypatch.setattr(gpu_validate, "PARTS", {"slow": Part(60, str(slow))})
    record = gpu_validate.run_part("slow", tmp_path, 0.5)
    assert (record["status"], gpu_validate.passed("slow", tmp_path)) == (124, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_validate.py"])
    assert gpu_validate.main() == 2
    assert "no CUDA GPU" in capsys.readouterr().err


# Says when it began to prepare, when it was ready, and when it measured.
_TURN = """
import pathlib, sys, time
sys.path.insert(0, {root!r})
from compiled_llm.bench.program_turns import wait_for_turn
times = [time.time()]
time.sleep({prepares})
times.append(time.time())
wait_for_turn()
times.append(time.time())
time.sleep(0.1)
pathlib.Path(sys.argv[1]).write_text(repr([*times, time.time()]))
sys.exit({status})
"""


def in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, cores: int) -> dict[str, list[float]]:
    """Three parts that prepare for 0.6, 0.1 and 0.3 s; their times: begun, ready, turn, end."""
    parts = {}
    for name, prepares in (("slow", 0.6), ("quick", 0.1), ("other", 0.3)):
        script = tmp_path / f"{name}.py"
        status = 3 if name == "other" else 0
        script.write_text(_TURN.format(root=str(ROOT), prepares=prepares, status=status))
        parts[name] = Part(60, f"{script} {tmp_path / name}.times {{json}}", 10)
    monkeypatch.setattr(gpu_validate, "PARTS", parts)
    found = gpu_validate.run_in_turns(list(parts), tmp_path, gpu_validate.Budget(60), cores, gib)
    assert found == {"slow": True, "quick": True, "other": False}
    return {name: json.loads((tmp_path / f"{name}.times").read_text()) for name in parts}


def test_parts_prepare_side_by_side_and_measure_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = in_turns(tmp_path, monkeypatch, gib=99, cores=18)
    assert max(begun for begun, *_ in times.values()) < min(end for *_, end in times.values())
    assert max(ready for _, ready, *_ in times.values()) < min(turn for *_, turn, _ in times.values())
    spans = sorted((turn, end) for *_, turn, end in times.values())
    assert all(end <= turn for (_, end), (turn, _) in itertools.pairwise(spans))
    record = json.loads((tmp_path / "quick.json").read_text())
    assert (record["status"], record["preparing_beside"]) == (0, [])
    assert record["turn_seconds"] < record["seconds"]


@pytest.mark.parametrize(("cores", "gib", "at_once"), [(12, 99, 2), (18, 5, 1)])
def test_as_many_prepare_as_cores_and_memory_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, gib: float, at_once: int
) -> None:
    spans = [(begun, end) for begun, _, _, end in in_turns(tmp_path, monkeypatch, gib, cores).values()]
    assert max(sum(begun <= moment < end for begun, end in spans) for moment, _ in spans) <= at_once


def test_a_smoke_that_fails_stops_those_that_prepare(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = on_a_gpu / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    parts = {"smoke": Part(75, str(on_a_gpu / "bad.py")), "slow": Part(60, str(slow), 1)}
    monkeypatch.setattr(gpu_validate, "PARTS", parts)
    began = time.perf_counter()
    found = gpu_validate.run_in_turns(list(parts), on_a_gpu, gpu_validate.Budget(60), 9, 99)
    assert (found, time.perf_counter() - began < 30) == ({"smoke": False}, True)


def test_an_interrupt_ends_those_that_wait(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = on_a_gpu / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu_validate, "PARTS", {"slow": Part(60, str(slow), 1)})
    started, start_part = [], gpu_validate.start_part
    monkeypatch.setattr(gpu_validate, "start_part", lambda *args: started.append(start_part(*args)) or started[0])
    monkeypatch.setattr(gpu_validate.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gpu_validate.run_in_turns(["slow"], on_a_gpu, gpu_validate.Budget(60), 9, 99)
    assert started[0].process.poll() is not None


_WAITS = "from compiled_llm.bench.program_turns import wait_for_turn; wait_for_turn()"


def test_who_waits_for_a_turn_ends_with_the_giver(tmp_path: Path) -> None:
    waits = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {_WAITS}"
    gives = (
        "import pathlib, subprocess, sys, time\n"
        f"waiting = subprocess.Popen([sys.executable, '-c', {waits!r}], stderr=subprocess.DEVNULL)\n"
        f"while not pathlib.Path({str(tmp_path / 'a.ready')!r}).exists(): time.sleep(0.01)\n"
        "print(waiting.pid)"
    )
    environment = {**os.environ, "COMPILED_LLM_TURN": str(tmp_path / "a")}
    done = subprocess.run([sys.executable, "-c", gives], env=environment, capture_output=True, text=True, check=True)
    end = time.perf_counter() + 20
    while time.perf_counter() < end:
        status = Path(f"/proc/{int(done.stdout)}/stat")
        if not status.exists() or ") Z " in status.read_text():
            return
        time.sleep(0.02)
    pytest.fail("it still waits")


def test_a_part_that_is_never_ready_ends_with_the_budget(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = on_a_gpu / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu_validate, "PARTS", {"slow": Part(60, str(slow), 1)})
    assert gpu_validate.run_in_turns(["slow"], on_a_gpu, gpu_validate.Budget(0.5), 9, 99) == {}


def test_measured_steps_are_summed_up(tmp_path: Path) -> None:
    result = {
        "step_us": 5361.4,
        "launches": 173,
        "prompts": [{"tokens": 2048, "first_token_ms": 48.9, "launches": 430}],
    }
    for name, status in (("kernels-8b-1", 0), ("kernels-8b-32", 1)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"part": name, "status": status, "result": result}))
    text = gpu_validate.summary(tmp_path)
    assert "kernels-8b-1 " in text
    assert "prompt of 2048, to its first token" in text
    assert "kernels-8b-32" not in text


def test_the_first_parts_fit_into_a_call_and_the_shortest_come_first() -> None:
    first = list(gpu_validate.PARTS)[: list(gpu_validate.PARTS).index("start")]
    assert first[0] == "smoke"
    assert all(gpu_validate.PARTS[name].seconds <= 60 for name in first if name != "smoke")
    assert all(gpu_validate.PARTS[name].gib is not None for name in first if name != "smoke")
    assert gpu_validate.ENVIRONMENT["TORCH_LOGS"] == "recompiles"


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if there were one; parts are scripts in the folder, which is returned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (99 << 30, 99 << 30))
    monkeypatch.setattr(gpu_validate.machine, "describe", lambda device: {"gpu": "none"})
    (tmp_path / "ok.py").write_text("import os; print('{}'); print(os.environ['TORCH_LOGS'])")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    return tmp_path


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_validate.py", *map(str, arguments)])
    return gpu_validate.main()


def test_two_calls_on_bare_machines_do_all(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second finds nothing but the archive."""
    ok, output, archive = on_a_gpu / "ok.py", on_a_gpu / "out", on_a_gpu / "kept.tgz"
    monkeypatch.setattr(gpu_validate, "PARTS", {"short": Part(60, str(ok)), "long": Part(300, str(ok))})
    arguments = ("--output", output, "--archive", archive, "--resume")
    assert run_main(monkeypatch, *arguments, "--budget", 100) == 1
    assert "long         left out" in capsys.readouterr().out
    assert "recompiles" in (output / "short.log").read_text()
    before = (output / "short.json").read_text()
    shutil.rmtree(output)
    assert run_main(monkeypatch, *arguments, "--budget", 1000) == 0
    assert "1 of 1 parts passed" in capsys.readouterr().out
    assert (output / "short.json").read_text() == before, "it did not run again"
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    assert {"out/short.json", "out/long.json", "out/long.log", "out/machine.json"} <= names
    assert not list(on_a_gpu.glob("*.part"))


def test_nothing_runs_after_a_smoke_that_failed(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"smoke": Part(75, str(on_a_gpu / "bad.py")), "other": Part(60, str(on_a_gpu / "ok.py"))}
    monkeypatch.setattr(gpu_validate, "PARTS", parts)
    output = on_a_gpu / "out"
    assert run_main(monkeypatch, "--output", output) == 1
    assert not (output / "other.json").exists()
    assert "the other parts are left out" in capsys.readouterr().out
    assert run_main(monkeypatch, "--output", output, "--part", "other") == 0
