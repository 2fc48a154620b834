"""Modes: what they set is accepted by the engine, is shown as flags, gives way to flags, and changes no result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.api.command_line import engine_config
from compiled_llm.api.config import EngineConfig
from compiled_llm.commands.batch import main
from compiled_llm.offline.flags import parse_arguments
from compiled_llm.offline.manifest import DECIDING
from compiled_llm.offline.modes import MODES, as_flags, mode_arguments

EVERY = [
    (mode, device) for mode in MODES for device in ("cpu", "cuda") if (mode, device) != ("throughput-offload", "cuda")
]


@pytest.mark.parametrize(("mode", "device"), EVERY)
def test_the_flags_of_a_mode_are_the_mode(mode: str, device: str) -> None:
    arguments = mode_arguments(mode, device)  # type: ignore[arg-type]
    more = ["--weights-path", "w"] if mode == "throughput-offload" else []
    by_mode = parse_arguments("batch", ["--device", device, "--mode", mode, *more])
    assert engine_config(by_mode) == EngineConfig(device=device, weights_path="w" if more else None, **arguments)
    by_flags = parse_arguments("batch", ["--device", device, *as_flags(arguments).split(), *more])
    assert engine_config(by_flags) == engine_config(by_mode)
    assert by_flags.mode_text is None
    assert by_mode.mode_text.splitlines()[0] == f"--mode {mode}: {as_flags(arguments) or 'as without it'}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_modes_differ_in_the_way_that_their_names_say(device: str) -> None:
    low, high = (mode_arguments(mode, device) for mode in ("low-latency", "high-throughput"))  # type: ignore[arg-type]
    assert low["bucket_sizes"][-1] < high["bucket_sizes"][-1]
    assert low["max_num_batched_tokens"] < high["max_num_batched_tokens"]
    assert mode_arguments("balanced", device) == {}  # type: ignore[arg-type]


def test_steps_that_read_weights_from_disk_are_those_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    offload = ["--mode", "throughput-offload"]
    for flags, said in (
        (["--device", "cpu"], "throughput-offload needs --weights-path DIR"),
        (["--device", "cuda", "--weights-path", "w"], "--mode must be another on a GPU"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments("batch", [*flags, *offload])
        assert said in capsys.readouterr().err
    sizes, usual = (mode_arguments(mode, "cpu") for mode in ("throughput-offload", "high-throughput"))
    assert sizes["max_num_batched_tokens"] > usual["max_num_batched_tokens"]


@pytest.mark.parametrize(("mode", "device"), EVERY)
def test_a_mode_sets_nothing_that_decides_tokens(mode: str, device: str) -> None:
    """Of the engine arguments, those that a run may not change when it goes on."""
    assert not mode_arguments(mode, device).keys() & set(DECIDING)  # type: ignore[arg-type]


def test_what_rounds_is_named_and_left_to_the_user() -> None:
    mode = ["--device", "cpu", "--mode", "low-latency"]
    said = "may be faster still with a large model, and changes the results a little"
    names = {
        (): f"--quantization int8_w8a8 --kv-cache-dtype int8 {said}",
        ("--quantization", "int4"): f"--kv-cache-dtype int8 {said}",
        ("--kv-cache-dtype", "fp8"): f"--quantization int8_w8a8 {said}",
    }
    for flags, line in names.items():
        args = parse_arguments("batch", [*mode, *flags])
        assert args.mode_text.splitlines()[1:] == [line]
    both = ["--quantization", "int8", "--kv-cache-dtype", "int8"]
    assert len(parse_arguments("batch", [*mode, *both]).mode_text.splitlines()) == 1
    assert (
        parse_arguments("batch", ["--device", "cpu", "--mode", "balanced"]).mode_text
        == "--mode balanced: as without it"
    )


def test_flags_go_before_a_mode_in_any_order() -> None:
    given, mode = ["--bucket-sizes", "1,4"], ["--device", "cpu", "--mode", "high-throughput"]
    for arguments in ([*given, *mode], [*mode, *given]):
        args = parse_arguments("batch", arguments)
        assert args.bucket_sizes == (1, 4)
        assert args.mode_text.splitlines()[0] == "--mode high-throughput: --max-num-batched-tokens 2048"


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


def test_a_run_shows_its_mode_as_flags_and_goes_on_in_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled and greedy rows, short and longer than a step of low-latency; to the bit, as log-probabilities show."""
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    long = {"prompt_token_ids": [5 + n % 90 for n in range(300)], "sampling_params": {"logprobs": 1}}
    greedy = {"prompt": "import os", "sampling_params": {"temperature": 0, "logprobs": 1}}
    given = [greedy, *({"prompt": f"def f{n}(x"} for n in range(3)), long]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    engine = ["--device", "cpu", "--enforce-eager", "--num-kv-blocks", "128", "--max-tokens", "6"]
    arguments = [*engine, "--input", str(rows), "--output", str(output), "--ordered"]
    assert main("batch", [*arguments, "--mode", "low-latency"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == f"--mode low-latency: {as_flags(mode_arguments('low-latency', 'cpu'))}"
    whole = output.read_bytes()
    assert len(whole.splitlines()) == len(given)
    output.write_bytes(b"")
    assert main("batch", [*arguments, "--mode", "high-throughput", "--resume"]) == 0
    assert output.read_bytes() == whole
