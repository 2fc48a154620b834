"""Modes: what they set is accepted by the engine, is shown as flags, and gives way to flags."""

import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.command_line import engine_config
from compiled_llm.config import EngineConfig
from compiled_llm.offline.command import main
from compiled_llm.offline.flags import parse_arguments
from compiled_llm.offline.modes import MODES, as_flags, mode_arguments


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", MODES)
def test_the_flags_of_a_mode_are_the_mode(mode: str, device: str) -> None:
    arguments = mode_arguments(mode, device)  # type: ignore[arg-type]
    by_mode = parse_arguments("batch", ["--device", device, "--mode", mode])
    assert engine_config(by_mode) == EngineConfig(device=device, **arguments)
    by_flags = parse_arguments("batch", ["--device", device, *as_flags(arguments).split()])
    assert engine_config(by_flags) == engine_config(by_mode)
    assert by_flags.mode_text is None
    assert by_mode.mode_text == f"--mode {mode}: {as_flags(arguments) or 'as without it'}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_modes_differ_in_the_way_that_their_names_say(device: str) -> None:
    low, high = (mode_arguments(mode, device) for mode in ("low-latency", "high-throughput"))  # type: ignore[arg-type]
    assert low["bucket_sizes"][-1] < high["bucket_sizes"][-1]
    assert low["max_num_batched_tokens"] < high["max_num_batched_tokens"]
    assert mode_arguments("balanced", device) == {}, "nothing is rounded"  # type: ignore[arg-type]


def test_flags_go_before_a_mode_in_any_order() -> None:
    given = ["--kv-cache-dtype", "auto", "--bucket-sizes", "1,4"]
    mode = ["--device", "cpu", "--mode", "high-throughput"]
    for arguments in ([*given, *mode], [*mode, *given]):
        args = parse_arguments("batch", arguments)
        assert (args.kv_cache_dtype, args.bucket_sizes) == ("auto", (1, 4))
        assert args.mode_text == "--mode high-throughput: --max-num-batched-tokens 2048 --quantization int8_w8a8"
    args = parse_arguments("batch", [*mode, "--quantization", "none"])
    assert args.quantization is None
    assert "--quantization" not in args.mode_text


def test_an_unknown_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments("batch", ["--mode", "fast"])
    assert "low-latency" in capsys.readouterr().err


def test_a_mode_with_a_device_loads_no_torch() -> None:
    code = (
        "import sys; from compiled_llm.offline.flags import parse_arguments; "
        "parse_arguments('batch', ['--mode', 'low-latency', '--device', 'cpu']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_shows_its_mode_as_flags_and_goes_on_in_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [5, 7]}\n')
    arguments = ["--device", "cpu", "--enforce-eager", "--num-kv-blocks", "64", "--max-tokens", "2"]
    arguments += ["--temperature", "0", "--input", str(rows), "--output", str(output)]
    assert main("batch", [*arguments, "--mode", "low-latency"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == f"--mode low-latency: {as_flags(mode_arguments('low-latency', 'cpu'))}"
    assert "KV cache     int8" in shown
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(SystemExit, match="2"):
        main("batch", [*arguments, "--mode", "balanced", "--resume"])
    assert "--quantization is None and was 'int8_w8a8'" in capsys.readouterr().err
    assert main("batch", [*arguments, "--mode", "high-throughput", "--resume"]) == 0, "the same bits in other buckets"
    assert len(output.read_text().splitlines()) == 2
