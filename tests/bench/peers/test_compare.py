"""Engines beside each other: turns and requests, ratios, an engine that fails, the workers of this environment."""

import dataclasses
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from compiled_llm.bench.peers import checkpoints, compare, processes, worker
from compiled_llm.models.config_file import read_config
from compiled_llm.models.registry import family
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits
from tests.checkpoint.gguf.writing import metadata_of, tensors_of, write

# Replaces the Python of a peer: answers as a worker does, at the speed of its options.
FAKE = """#!{python}
import json, os, sys
worker, name, directory, options = sys.argv[1:]
options = json.loads(options)
if options.get("broken"):
    sys.exit("no such model")
print(json.dumps({{"versions": {{"fake": "1.0"}}}}), flush=True)
for line in sys.stdin:
    requests = json.loads(line)
    with open(os.path.join(os.path.dirname(__file__), "log.jsonl"), "a") as log:
        print(json.dumps([name, requests]), file=log)
    asked = globals().get("asked", 0) + 1
    speed = options.get("speed", 10) * options.get("factors", {{}}).get(str(asked), 1)
    seconds = sum(n for _, n in requests) / speed
    while options.get("mute"):
        pass
    lens = [n - options.get("missing", 0) for _, n in requests]
    answer = {{"seconds": seconds, "ttft": [seconds / 2] * len(lens), "output_lens": lens}}
    answer |= {{"decode_tokens": sum(lens) - len(lens), "decode_seconds": seconds / 2}}
    if name == "engine":
        answer["work"] = {{"tokens": 4, "bytes": 80e6, "flops": 8e9}}
    print(json.dumps(answer), flush=True)
"""


LIMITS = MachineLimits("cpu", "bfloat16", 100.0, 1e12, "avx2", "2026-01-01T00:00:00+00:00")


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype: LIMITS)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def start(fake: Path, tmp_path: Path) -> Any:
    workers = []

    def start(timeout: float = 60, **options: Any) -> Any:
        peer = processes.Peer("fake", str(fake), tmp_path, options, {})
        workers.append(processes.Worker(peer, tmp_path / "fake.log", timeout))
        return workers[-1]

    yield start
    for one in workers:
        one.close()


def run(*arguments: str) -> int:
    return compare.main("compiled-llm bench peers", ["--shape", "tiny", *arguments])


def wait_for_state(process: psutil.Process, state: str) -> None:
    deadline = time.monotonic() + 10
    while process.status() != state:
        assert time.monotonic() < deadline, f"{process.status()}, not {state}"
        time.sleep(0.01)


# -- The processes


def test_a_worker_is_stopped_whenever_it_has_nothing_to_do(start: Any) -> None:
    worker = start()
    process = psutil.Process(worker._process.pid)
    wait_for_state(process, psutil.STATUS_STOPPED)
    assert worker.versions == {"fake": "1.0"}
    answer = {"seconds": 3.0, "ttft": [1.5], "output_lens": [30], "decode_tokens": 29, "decode_seconds": 1.5}
    assert worker.run([([1, 2], 30)]) == answer
    wait_for_state(process, psutil.STATUS_STOPPED)
    assert 2**20 < worker.peak_memory_bytes() < 2**30
    assert worker.run([([1, 2], 30)], before=[([3], 5)])["seconds"] == 3.0, "the answer is that of the requests"
    wait_for_state(process, psutil.STATUS_STOPPED)
    worker.close()
    assert not process.is_running()


def test_a_worker_that_fails_says_why(start: Any) -> None:
    with pytest.raises(processes.PeerFailed, match=r"fake: ended with status 1; its last lines:\nno such model"):
        start(broken=True)
    with pytest.raises(processes.PeerFailed, match=r"generated \[29\] tokens"):
        start(missing=1).run([([1], 30)])
    slow = start(mute=True)
    slow._timeout = 0.5
    with pytest.raises(processes.PeerFailed, match=r"no answer in 0.5 s"):
        slow.run([([1], 30)])


def test_vllm_gets_its_libraries_and_is_bound_to_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libtcmalloc.so.4" if name == "tcmalloc" else None)
    with pytest.raises(processes.PeerFailed, match=r"libiomp5 .* was not found"):
        processes.vllm(str(python), tmp_path, {}, 1, None)
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    peer = processes.vllm(str(python), tmp_path, {"max_num_seqs": 4}, 1, None)
    assert peer.env["LD_PRELOAD"] == f"libtcmalloc.so.4:{library}"
    assert peer.env["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert "VLLM_CPU_KVCACHE_SPACE" not in peer.env, "what is set outside stays"
    assert (peer.options["max_num_seqs"], peer.options["enable_prefix_caching"]) == (4, True)
    assert processes.vllm(str(python), tmp_path, {}, 1, "x.so").env["LD_PRELOAD"] == "x.so"


@pytest.mark.parametrize("name", ["engine", pytest.param("transformers", marks=pytest.mark.battery)])
def test_the_workers_of_this_environment(name: str, tmp_path: Path) -> None:
    """Their counts and times; the transformers worker stops counting at what a request asked for."""
    checkpoints.write_checkpoint("tiny", tmp_path / "tiny")
    options = {"engine": {"enforce_eager": True, "bucket_sizes": [4], "max_model_len": 128}, "transformers": {}}[name]
    sent, answers = json.dumps([([5, 6, 7, 8], 2), ([9] * 40, 6), ([9] * 50, 1)]), io.StringIO()
    worker.serve(worker.PEERS[name](str(tmp_path / "tiny"), options), io.StringIO(f"{sent}\n{sent}\n"), answers)
    first, *rest = map(json.loads, answers.getvalue().splitlines())
    assert {"torch"} < first["versions"].keys()
    assert len(rest) == 2
    for answer in rest:
        assert answer["output_lens"] == [2, 6, 1]
        assert all(0 < ttft <= answer["seconds"] for ttft in answer["ttft"])
        assert answer["ttft"][1] < answer["seconds"], "five more tokens came after the first"
        assert answer["decode_seconds"] == answer["seconds"] - max(answer["ttft"])
        assert 4 <= answer["decode_tokens"] <= 5 + 1, "all but the first ones, and those before the last first one"
        assert ("work" in answer) == (name == "engine")
        if name == "engine":
            assert answer["work"]["tokens"] >= answer["decode_tokens"]
            assert min(answer["work"].values()) > 0


# -- Requests and figures


def test_shifted_requests_keep_what_they_share_and_share_nothing_with_others() -> None:
    requests = compare.WORKLOADS["W3"](1000, 0)
    first, second = compare.shifted(requests, 3, 1000), compare.shifted(requests, 4, 1000)
    for shifted in (first, second):
        assert [(len(r.prompt_token_ids), r.output_len) for r in shifted] == [(544, 32)] * 16
        assert len({tuple(r.prompt_token_ids[:512]) for r in shifted}) == 1
        assert len({tuple(r.prompt_token_ids[512:]) for r in shifted}) == 16
        assert {t for r in shifted for t in r.prompt_token_ids} <= set(range(1000))
    assert first[0].prompt_token_ids[0] != second[0].prompt_token_ids[0]


def test_ratios_are_of_the_same_rounds_and_above_one_where_this_engine_leads() -> None:
    samples = {
        "engine": {"W2 output tok/s": {1: 20.0, 2: 40.0, 3: 90.0}, "W3 wall s": {1: 2.0, 2: 4.0}},
        "a": {"W2 output tok/s": {1: 10.0, 2: 10.0, 3: 90.0}, "W3 wall s": {1: 3.0, 2: 4.0}},
        "b": {"W2 output tok/s": {2: 80.0}},
    }
    rows = compare.compared(samples)
    assert list(rows) == ["W2 output tok/s", "W3 wall s"]
    speed, wall = rows["W2 output tok/s"], rows["W3 wall s"]
    assert (speed["best_peer"], wall["best_peer"]) == ("b", "a")
    assert speed["engines"]["engine"]["median"] == 40
    assert (speed["engines"]["engine"]["min"], speed["engines"]["engine"]["max"]) == (20, 90)
    assert speed["engines"]["engine"]["ratio"] is None
    a = speed["engines"]["a"]
    assert (a["ratio"], a["ratio_min"], a["ratio_max"]) == (2, 1, 4), "of 2, 4 and 1"
    assert speed["engines"]["b"]["ratio"] == 0.5
    assert wall["engines"]["a"]["ratio"] == 1.25, "the median of 1.5 and 1"


def test_figures() -> None:
    answer = {"seconds": 4.0, "ttft": [0.5], "output_lens": [], "decode_tokens": 7, "decode_seconds": 3.5}
    request = compare.WorkloadRequest([0] * 100, 8)
    figures = {row: metric.figure([request, request], answer) for row, metric in compare.METRICS.items()}
    assert figures == {
        "W1 decode tok/s": 7 / 3.5,
        "W1 TTFT s": 0.5,
        "W2 output tok/s": 16 / 4,
        "W3 wall s": 4.0,
        "W4 prefill tok/s": 100 / 0.5,
        "W5 decode tok/s": 7 / 3.5,
        "W6 TTFT s": 0.5,
    }


def test_a_share_of_the_limit_is_that_of_the_least_time_of_a_token() -> None:
    engines = {"engine": {"median": 8.0}, "a": {"median": 4.0}}
    run = {"tokens": 10, "bytes": 50.0, "flops": 20.0}
    runs = [run, run | {"bytes": 100.0, "tokens": 20}, run | {"bytes": 900.0}]
    rows = {"W5 decode tok/s": {"engines": engines}}
    shares = compare.shares_of_the_limit(rows, {"W5": runs, "W1": runs}, LIMITS)
    assert list(shares) == ["W5"], "W1 was not measured"
    expected = {"engine": pytest.approx(0.4), "a": pytest.approx(0.2)}
    assert shares["W5"] == {"bytes_per_token": 5, "flops_per_token": 2, "share_of_limit": expected}
    slow = dataclasses.replace(LIMITS, flops_per_second=20.0)
    assert compare.shares_of_the_limit(rows, {"W5": runs}, slow)["W5"]["share_of_limit"]["engine"] == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["gpt-oss-20b-2l", "qwen3-0.6b"])
def test_a_shape_is_the_same_model_to_all(monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path) -> None:
    """The checkpoint that all engines read, and the config alone, for which this engine makes weights."""
    small = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 300}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    shape = {key: small.get(key, value) for key, value in checkpoints.SHAPES[name].items()}
    monkeypatch.setitem(checkpoints.SHAPES, name, shape)
    checkpoints.write_checkpoint(name, tmp_path / name)
    written = read_config(tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(shape | {"dtype": "bfloat16"}))
    assert written == read_config(tmp_path)
    held = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / name / "model.safetensors").items()}
    stored = family(written.architecture).describe(written).stored
    assert {key: (shape,) for key, shape in held.items()} == {key: part.shapes for key, part in stored.items()}


# -- The whole


@pytest.fixture
def fakes_only(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This engine and the export are played by the fake too."""
    monkeypatch.setattr(processes.sys, "executable", str(fake))
    tool = fake.with_name("optimum-cli")
    tool.write_text('#!/bin/sh\nfor last; do true; done\nmkdir -p "$last" && touch "$last/openvino_model.xml"\n')
    tool.chmod(0o755)


@pytest.mark.usefixtures("fakes_only")
def test_all_get_the_same_requests_in_turns(
    monkeypatch: pytest.MonkeyPatch, fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    speeds = ["--engine-args", '{"speed": 30}', "--vllm-args", '{"speed": 20}']
    peers = ["--vllm-python", str(fake), "--vllm-preload", "", "--openvino-python", str(fake), "--transformers"]
    outputs = ["--workdir", str(tmp_path / "work"), "--json", str(file)]
    assert run("--workloads", "W1", "W3", "--repeats", "2", *speeds, *peers, *outputs) == 0

    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    single = ["engine", "vllm", "openvino", "openvino-stateful", "transformers"]
    several = [name for name in single if name != "openvino-stateful"]
    warmups = [(name, len(requests)) for name, requests in lines[:9]]
    assert warmups == [(name, n) for name in single for n in (1, 16) if n == 1 or name in several]
    assert all(n == compare.WARMUP_OUTPUT_LEN for _, requests in lines[:9] for _, n in requests)
    befores, measured = lines[9::2], lines[10::2]
    assert [name for name, _ in befores] == [name for name, _ in measured]
    assert all([len(prompt) for prompt, _ in requests] == [32] for _, requests in befores), "short, and not measured"
    expected = [single, several, single[:-1], several[:-1]]  # transformers: one round
    for names in expected:
        turn, measured = measured[: len(names)], measured[len(names) :]
        assert sorted(name for name, _ in turn) == sorted(names)
        assert all(requests == turn[0][1] for _, requests in turn)
    assert not measured
    assert lines[9][0] != lines[9 + 2 * 9][0], "the rounds start with different engines"
    prompts = {tuple(requests[0][0][:2]) for _, requests in lines}
    assert len(prompts) == 10, "two workloads, a warm-up and two rounds, and a short one before each: none alike"

    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert json.loads(file.read_text()) == result
    assert (result["rounds"], result["set_aside"], result["unsteady"]) == (2, [], [])
    assert result["rows"]["W3 wall s"]["best_peer"] == "vllm"
    assert result["rows"]["W3 wall s"]["engines"]["vllm"]["ratio"] == pytest.approx(1.5)
    assert result["engines"]["vllm"]["versions"] == {"fake": "1.0"}
    assert result["engines"]["vllm"]["peak_memory_bytes"] > 0
    assert next(line for line in out if line.startswith("W3 wall s")).endswith("1.50 (1.50..1.50) vllm")
    assert result["limits"]["read_bytes_per_second"] == LIMITS.read_bytes_per_second
    assert list(result["decode"]) == ["W1"]
    rate, least = 127 / (128 / 30 / 2), 20e6 / LIMITS.read_bytes_per_second
    shares = result["decode"]["W1"]["share_of_limit"]
    assert shares["engine"] == pytest.approx(rate * least)
    assert shares["vllm"] == pytest.approx(rate * least * 2 / 3)


@pytest.mark.usefixtures("fakes_only")
def test_a_gguf_file_is_read_as_it_is(
    monkeypatch: pytest.MonkeyPatch, fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "model.gguf", "qwen3", metadata_of("qwen3"), tensors_of("qwen3"))
    monkeypatch.setattr(checkpoints, "write_gguf", None)
    flags = ["--model", str(file), "--workloads", "W6"]
    assert compare.main("bench peers", [*flags, "--repeats", "1", "--llama-python", str(fake)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["precision"] == "file"
    assert list(result["engines"]) == ["engine", "llama.cpp"]
    with pytest.raises(SystemExit, match="2"):
        compare.main("bench peers", [*flags, "--transformers", "--precision", "int8"])
    assert "--transformers, --precision must be left out where --model is a .gguf file" in capsys.readouterr().err


@pytest.mark.usefixtures("fakes_only")
def test_a_disturbed_round_is_set_aside_and_run_again(
    monkeypatch: pytest.MonkeyPatch, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each engine is asked once to warm up, then twice in a round: so its fifth answer is that of the second round.
    engine = ["--engine-args", '{"speed": 30, "factors": {"5": 0.5}}']
    vllm = ["--vllm-python", str(fake), "--vllm-preload", "", "--vllm-args", '{"factors": {"9": 1.1}}']
    arguments = ["--workloads", "W1", "--repeats", "4", "--transformers", *engine, *vllm]
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert result["rounds"] == 5
    (aside,) = result["set_aside"]
    assert (aside["workload"], aside["round"]) == ("W1", 2)
    assert aside["because"] == "W1 decode tok/s of engine was 29.77, the median 59.53"
    assert f"round 2 of W1 is set aside and run again: {aside['because']}" in captured.err
    assert aside["figures"]["engine"]["W1 decode tok/s"] == pytest.approx(29.77, abs=0.01)
    engines = result["rows"]["W1 decode tok/s"]["engines"]
    assert list(engines["vllm"]["samples"]) == list(engines["engine"]["samples"]) == ["1", "3", "4", "5"]
    assert engines["vllm"]["ratio"] == pytest.approx(3.0)
    assert list(engines["transformers"]["samples"]) == ["1"]
    assert result["unsteady"] == [], "10% is no disturbance"


@pytest.mark.usefixtures("fakes_only")
def test_rounds_that_stay_unsteady_are_kept_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    factors = {str(asked): 2.0**asked for asked in range(30)}
    engine = ["--engine-args", json.dumps({"factors": factors})]
    assert run("--workloads", "W4", "--repeats", "2", "--more-rounds", "2", *engine) == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert (result["rounds"], len(result["set_aside"])) == (4, 2)
    assert len(result["rows"]["W4 prefill tok/s"]["engines"]["engine"]["samples"]) == 2
    assert result["unsteady"] == ["W4 prefill tok/s of engine: rounds differ by 300%"]
    assert "UNSTEADY: W4 prefill tok/s of engine: rounds differ by 300%" in out


def test_the_round_that_is_farthest_off_is_found() -> None:
    row = "W3 wall s"
    samples = {"a": {row: {1: 10.0, 2: 10.0, 3: 13.0}}, "b": {row: {1: 5.0, 2: 3.0, 3: 5.0}}}
    assert compare.worst_round(samples, "W3") == (2, "W3 wall s of b was 3, the median 5")
    assert compare.worst_round({"a": {row: {1: 10.0, 2: 11.9, 3: 10.0}}, "failed": {}}, "W3") is None
    assert compare.worst_round(samples, "W1") is None


@pytest.mark.usefixtures("fakes_only")
def test_a_peer_that_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = ["--vllm-python", str(fake), "--vllm-preload", "", "--vllm-args", '{"broken": true}', "--transformers"]
    assert run("--workloads", "W4", "--repeats", "1", *peers) == 1
    out = capsys.readouterr().out
    assert "FAILED: vllm: ended with status 1" in out
    result = json.loads(out.splitlines()[-1])
    assert "no such model" in result["engines"]["vllm"]["failed"]
    assert list(result["rows"]["W4 prefill tok/s"]["engines"]) == ["engine", "transformers"]
