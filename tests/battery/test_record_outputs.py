"""record_outputs: an engine recorded twice gives the same, and a recording that was changed is reported."""

import json
import sys
from pathlib import Path

import pytest

from tests.battery import record_outputs


def test_a_changed_recording_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "before.json"

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["record_outputs.py", "--only", "dummy-bfloat16", *arguments])
        return record_outputs.main()

    assert main("--write", str(path)) == 0
    recording = json.loads(path.read_text())
    requests = recording["cases"]["dummy-bfloat16/parameters"]
    token, logprob, *rest = requests[8]["outputs"][0]["logprobs"][1][0].split(":")
    next_bit = float.fromhex(logprob) * (1 + 2**-52)
    requests[8]["outputs"][0]["logprobs"][1][0] = ":".join([token, next_bit.hex(), *rest])
    requests[9]["outputs"][0]["token_ids"].pop()
    path.write_text(json.dumps(recording))
    assert main("--compare", str(path)) == 1
    printed = capsys.readouterr().out
    assert "dummy-bfloat16/parameters[8].outputs[0].logprobs[1][0]: " in printed
    assert "dummy-bfloat16/parameters[9].outputs[0].token_ids: " in printed
    assert "3 cases, 1 differ" in printed  # the others came out the same


def test_every_kind_of_difference(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"a/x": [{"n": 1, "text": "one"}], "a/y": [1, 2], "b/z": [None, 1, "t"], "c": 0}
    assert record_outputs.compare(before, before) == 0
    after = {"a/x": [{"n": 1, "text": "two"}], "a/y": [1, 2, 3], "b/z": [None, 1.0, "t"], "d": 0}
    assert record_outputs.compare(before, after) == 5
    assert capsys.readouterr().out.splitlines()[1:] == [
        "a/x[0].text: 'one' -> 'two'",
        "a/y: '[1, 2]' -> '[1, 2, 3]'",
        "b/z[1]: '1' -> '1.0'",
        "c: only in the file",
        "d: only in the new recording",
        "5 cases, 5 differ",
    ]


def test_the_set_has_every_family_dtype_and_cache_dtype() -> None:
    names = {name for name, *_ in record_outputs.engines()}
    for model in ("llama", "qwen3"):
        for dtype in ("float32", "bfloat16", "float16"):
            for cache in ("auto", "int8", "fp8"):
                assert {f"{model}-{dtype}-{cache}-{size}" for size in ("large", "swap", "recompute")} <= names


def test_engines_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["record_outputs.py", "--write", "x.json", "--only", "llama-int3"])
    with pytest.raises(SystemExit, match="2"):
        record_outputs.main()
    assert "--only must be a part of one of llama-float32-auto-large, " in capsys.readouterr().err
