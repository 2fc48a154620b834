"""A tiny run of each benchmark: the keys that documents and programs read, and what the table says."""

import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_llm.bench import (
    all_reduce,
    arrivals,
    gpt_fast,
    harness,
    hf,
    host,
    kernels,
    latency,
    loading,
    lora,
    plan,
    products,
    sampling,
    settings,
    shared,
    speculation,
    start,
    step_costs,
    throughput,
    tiers,
)
from compiled_llm.commands import plan as plan_command
from compiled_llm.ops.native import cache_directory
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits
from tests.families import checkpoint

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "compiled_llm" / "demo_model"
TINY = ("--shape", "tiny", "--enforce-eager")
SMALL = (*TINY, "--bucket-sizes", "1,4")
RANDOM = ("--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "5")
LIMITS = MachineLimits("cpu", "bfloat16", 1e9, 1e12, "made up", "2026-01-01T00:00:00+00:00")
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and caches of a small machine."""
    monkeypatch.setattr(harness, "CACHED_BYTES", 1 << 16)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, **options: LIMITS)
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: LIMITS)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark -> (its JSON line, all that it printed)."""

    def ran(bench: ModuleType, *words: str, status: int = 0) -> tuple[dict[str, Any], str]:
        assert bench.main("compiled-llm bench it", list(map(str, words))) == status
        out = capsys.readouterr().out
        result = json.loads(out.splitlines()[-1])
        assert result["benchmark"]
        assert result["machine"]["torch"] == torch.__version__
        return result, out

    return ran


def test_latency(run: Run, tmp_path: Path) -> None:
    words = (
        "--batch-size",
        "3",
        "--input-len",
        "40",
        "--output-len",
        "4",
        "--num-iters",
        "2",
        "--report",
        tmp_path / "r",
    )
    result, _ = run(latency, *SMALL, *words, "--output-json", tmp_path / "a.json", "--enable-prefix-caching")
    assert json.loads((tmp_path / "a.json").read_text()) == result
    low, high = sorted(result["latencies"])
    assert result["avg_latency"] == pytest.approx((low + high) / 2)
    assert result["percentiles"]["90"] == pytest.approx(low + 0.9 * (high - low))
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    for whole, ttft, tpot in zip(result["latencies"], result["ttfts"], result["tpots"], strict=True):
        assert 0 < ttft + 3 * tpot <= whole
    assert (result["steps"]["num_steps"], result["steps"]["prefix_hit_tokens"]) == (2 * 4, 2 * 3 * 32)
    assert (result["engine"]["dtype"], result["engine"]["enforce_eager"]) == ("bfloat16", True)
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert sum(phase["num_tokens"] for phase in report["phases"]) == 2 * 3 * (8 + 3), "no warm-up"


def test_latency_of_transformers_and_of_one_token(run: Run) -> None:
    words = ("--shape", "tiny", "--batch-size", "2", "--input-len", "9", "--num-iters", "2")
    result, _ = run(latency, *words, "--output-len", "4", "--backend", "hf")
    assert (result["backend"], result["engine"]["dtype"]) == ("hf", "bfloat16")
    for whole, ttft, tpot in zip(result["latencies"], result["ttfts"], result["tpots"], strict=True):
        assert ttft + 3 * tpot == pytest.approx(whole)
    result, _ = run(latency, *words, "--output-len", "1", "--backend", "hf", "--num-iters-warmup", "0")
    assert (result["tpots"], result["median_tpot_ms"]) == ([None, None], None)


def test_throughput(run: Run, tmp_path: Path) -> None:
    """W3: 512 tokens that 16 requests share. Those of the last run were not found in what an earlier one left."""
    words = ("--workload", "W3", "--repeats", "3", "--token-bucket-sizes", "512", "--report", tmp_path / "r")
    result, _ = run(throughput, *SMALL, *words, "--output-json", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == result
    assert (result["num_requests"], result["workload"]) == (16, "W3")
    assert result["steps"]["prefix_hit_tokens"] == 15 * 512
    assert result["elapsed_time"] == sorted(result["elapsed_times"])[1]
    assert (
        result["total_num_tokens"] == result["total_prompt_tokens"] + result["total_output_tokens"] == 16 * (544 + 32)
    )
    assert result["requests_per_second"] == pytest.approx(16 / result["elapsed_time"])
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] < result["elapsed_times"][-1] * 1e3
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert sum(phase["num_tokens"] for phase in report["phases"]) == 512 + 16 * (32 + 31), "the last run alone"


def test_throughput_of_transformers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    generate = hf.generate

    def counted(model: Any, batch: Any, **options: Any) -> torch.Tensor:
        batches.append(len(batch))
        return generate(model, batch, **options)

    monkeypatch.setattr(hf, "generate", counted)
    words = ("--shape", "tiny", *RANDOM, "--repeats", "1", "--backend", "hf", "--hf-max-batch-size", "3")
    result, _ = run(throughput, *words)
    assert batches == [1, 3, 2], "one to warm up, then five, three at a time"
    assert (result["total_output_tokens"], result["hf_max_batch_size"]) == (20, 3)


def test_arrivals(run: Run, tmp_path: Path) -> None:
    words = ("--request-rate", "200", "--goodput", "ttft:1e9", "tpot:1e9", "--metric-percentiles", "90,99")
    result, _ = run(
        arrivals, *SMALL, *RANDOM, *words, "--save-result", "--save-detailed", "--result-dir", tmp_path / "new"
    )
    (path,) = (tmp_path / "new").iterdir()
    assert path.name.startswith("compiled-llm-200qps-tiny-")
    saved = json.loads(path.read_text())
    assert {key: saved[key] for key in result} == result
    assert "itls" not in result
    assert (saved["completed"], saved["failed"], saved["request_rate"], saved["max_concurrency"]) == (5, 0, 200, None)
    assert saved["request_goodput"] == saved["request_throughput"] == pytest.approx(5 / saved["duration"])
    assert (saved["input_lens"], saved["output_lens"], saved["errors"]) == ([20] * 5, [4] * 5, [""] * 5)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < saved[f"p90_{metric}_ms"] <= saved[f"p99_{metric}_ms"]
    for ttft, itls, whole in zip(saved["ttfts"], saved["itls"], saved["latencies"], strict=True):
        assert ttft + sum(itls) == pytest.approx(whole)


def test_a_rate_is_searched_and_requests_queue_at_the_client(run: Run) -> None:
    result, _ = run(arrivals, *SMALL, *RANDOM, "--goodput", "e2el:1e9", "--find-goodput")
    assert result["request_rate"] == result["goodput_search"]["max_request_rate"] == "inf"
    words = ("--goodput", "e2el:0", "--find-goodput", "--num-warmups", "0", "--num-prompts", "2", "--input-len", "5")
    result, out = run(arrivals, *SMALL, *words, "--output-len", "2", status=1)
    assert "no rate with 90% of the requests" in out
    assert [trial["goodput_share"] for trial in result["goodput_search"]["trials"]] == [0] * 6
    metrics = "client_queue_time,e2el_including_client_queue,e2el"
    result, _ = run(arrivals, *SMALL, *RANDOM, "--max-concurrency", "1", "--percentile-metrics", metrics)
    together = result["mean_client_queue_time_ms"] + result["mean_e2el_ms"]
    assert result["mean_e2el_including_client_queue_ms"] == pytest.approx(together)


@pytest.mark.battery
def test_settings(run: Run, tmp_path: Path) -> None:
    words = ("--precisions", "none", "int4/int8", "--workloads", "W1", "--repeats", "1", "--json", tmp_path / "a.json")
    result, out = run(settings, *TINY, *words)
    assert json.loads((tmp_path / "a.json").read_text()) == result
    plain, quantised = result["rows"]
    assert (plain["setting"], quantised["setting"], plain["ratio"]) == ("none", "int4/int8", 1)
    assert quantised["weights_gb"] < 0.7 * plain["weights_gb"]
    assert plain["of_limit"] == pytest.approx(plain["median"] * plain["weights_gb"])
    assert [len(values) for values in result["speeds"]["W1"].values()] == [1, 1]
    assert "tiny, bfloat16" in out


@pytest.mark.parametrize("flags", [("--cold",), ()])
def test_loading(run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    dropped: list[Any] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *what: dropped.append(what))
    model = checkpoint("llama")
    result, out = run(loading, "--model", model, "--rounds", "2", *flags)
    assert len(dropped) == (2 * 3 if flags else 0), "before each read and each load, the first ones included"
    assert result["from"] == ("disk" if flags else "page cache")
    assert result["file_bytes"] == (model / "model.safetensors").stat().st_size
    assert result["weight_bytes"] > 0.9 * result["file_bytes"]
    assert min(result[name] for name in ("read_seconds", "load_seconds", "load_over_read")) > 0
    assert "load over plain read" in out


@pytest.mark.battery
def test_the_promise_of_the_peak_at_full_size(tmp_path: Path) -> None:
    start.write_checkpoint(tmp_path, "qwen3-0.6b")
    assert loading.measure(tmp_path, "auto", 1)["peak_over_weights"] < 1.2


def test_host(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that does not start is named, and the others are measured."""
    started = host.started
    broken = mock.Mock(side_effect=RuntimeError("no such graph"))
    monkeypatch.setattr(
        host, "started", lambda args, size, graphs: (broken if size == 1 else started)(args, size, graphs)
    )
    words = ("--requests", "1,2", "--waiting", "0,3", "--steps", "6", "--kinds", "final", "--output", tmp_path / "new")
    result, out = run(host, *words, status=1)
    assert json.loads((tmp_path / "new" / "host.json").read_text())["results"] == result["results"]
    bad, *good = result["results"]
    assert "no such graph" in bad["error"]
    assert "1 requests, manual: Traceback" in out
    assert [(row["waiting"], row["outputs of"]) for row in good] == [(0, "final"), (3, "final")]
    for row in good:
        parts = [row[part] for part in host.PARTS]
        assert min(parts) > 0
        assert row["host"] / 4 < sum(parts) < 2 * row["host"]  # medians of parts, and the median of their sum


def test_sampling(run: Run) -> None:
    result, _ = run(sampling, *TINY, "--batch-size", "2", "--context", "20", "--rounds", "2")
    assert list(result["kinds"]) == list(sampling.KINDS)
    assert all(kind["ms"] > 0 and kind["share"] > 0 for kind in result["kinds"].values())
    assert (result["step_ms"] > 0, result["graph_breaks"], result["recompiles"]) == (True, 0, 0)


def test_speculation(run: Run) -> None:
    words = ("--model", DEMO, "--enforce-eager", "--bucket-sizes", "1,4", "--batch-sizes", "2", "--rounds", "1")
    more = "--methods", "suffix", "layer_skip", "--trees", "--acceptance"
    result, out = run(speculation, *words, *more, "--num-tokens", "24", "--temperatures", "0.5")
    (runs,) = result["runs"].values()
    assert list(runs) == ["none", "suffix", "layer_skip", "suffix tree"]
    assert runs["none"]["ratio"] == 1.0
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in runs.values())
    assert runs["suffix"]["accepted_length"] > 1
    assert runs["suffix"]["draft_us"] > 0
    assert "accepted_share" in out
    (of_network,) = result["acceptance"]
    assert of_network["method"] == "layer_skip"
    assert of_network["drafts"] > 20
    assert 0 < of_network["accepted"] < 1
    assert 0.8 * of_network["accepted"] < of_network["optimum"] < 1


def test_lora(run: Run) -> None:
    words = (*TINY, "--bucket-sizes", "4", "--batch-sizes", "3", "--num-adapters", "2", "--rounds", "1")
    result, _ = run(lora, *words, "--num-tokens", "4", "--modules-to-save", "3")
    runs = result["runs"]["batch 3"]
    assert list(runs) == ["base", "none", "1", "2", "1 with a head", "3 with a head"]
    assert runs["base"]["ratio"] == 1.0
    assert all(row["tokens_per_second"] > 0 for row in runs.values())


# What ``worker.py`` imports of vLLM, each step of which gives every request a token.
VLLM = {
    "__init__.py": """
from pathlib import Path
from types import SimpleNamespace

SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, directory, *, enable_lora=False, max_loras=1, max_lora_rank=16, **options):
        self.most, self.open, self.llm_engine = max_loras if enable_lora else 0, {}, self
        assert not enable_lora or max_lora_rank == 8

    def add_request(self, request_id, prompt, params, lora_request):
        if lora_request is not None:
            assert 1 <= lora_request.lora_int_id <= self.most
            assert Path(lora_request.lora_path, "adapter_config.json").exists()
        self.open[request_id] = params.max_tokens

    def has_unfinished_requests(self):
        return bool(self.open)

    def step(self):
        given = [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[5])]) for name in self.open]
        self.open = {name: left - 1 for name, left in self.open.items() if left > 1}
        return given

    def reset_prefix_cache(self):
        return True
""",
    "sampling_params.py": "class RequestOutputKind:\n    DELTA = 1\n",
    "lora/__init__.py": "",
    "lora/request.py": """
class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        self.lora_int_id, self.lora_path = lora_int_id, lora_path
""",
}


def test_lora_beside_vllm(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in VLLM.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ("--model", DEMO, "--enforce-eager", "--bucket-sizes", "4", "--batch-sizes", "3", "--num-adapters", "2")
    peer = ("--vllm-python", sys.executable, "--vllm-preload", "")
    result, _ = run(lora, *words, "--rounds", "1", "--num-tokens", "2", "--rank", "5", *peer)
    runs = result["runs"]["batch 3"]
    assert list(runs) == ["base", "none", "1", "2", "vllm base", "vllm none", "vllm 1", "vllm 2"]
    assert runs["vllm base"]["ratio"] == 1.0
    assert result["vllm"]["torch"] == importlib.metadata.version("torch")  # its own one has "+cu130" too


def test_tiers(run: Run) -> None:
    words = (*TINY, "--bucket-sizes", "4", "--input-len", "64", "--num-tokens", "2", "--rounds", "1")
    result, out = run(tiers, *words)
    assert [row["first token"] for row in result["runs"]] == ["computed", "host", "disk", "disk cached", "restarted"]
    assert all(row["seconds"] > 0 for row in result["runs"])
    assert result["restarted_computed"] == 16
    assert "48 of 64 tokens from files, 16 computed" in out


def test_kernels(run: Run, tmp_path: Path) -> None:
    words = ("--model", DEMO, "--device", "cpu", "--batch-size", "3", "--context", "20", "--repeats", "2")
    result, out = run(kernels, *words, "--enforce-eager", "--prompts", "30", "--json", tmp_path / "a.json")
    saved = json.loads((tmp_path / "a.json").read_text())
    assert "demo_model, bfloat16, 3 requests of 22 keys, the mean" in out
    assert result["launches"] == len(saved["in_order"]) > 20
    rows = {row["name"]: row for row in result["kernels"]}
    layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    assert rows["compiled_llm::paged_attention"]["count"] == layers
    assert sum(row["us"] for row in rows.values()) == pytest.approx(result["busy_us"])
    (prompt,) = saved["prompts"]
    assert (prompt["tokens"], prompt["launches"]) == (30, len(prompt["in_order"]))
    assert min(prompt["first_token_ms"], result["step_us"]) > 0


def test_products(run: Run, tmp_path: Path) -> None:
    words = ("--size", "256x128", "8x48", "16x64x8x2", "--rows", "1", "33", "--seconds", "0")
    result, out = run(products, *words, "--json", tmp_path / "a.json")
    rows = result["results"]
    assert [(row["layer"], row["rows"]) for row in rows] == [
        (s, n) for s in ("256x128", "8x48", "16x64x8x2") for n in (1, 33)
    ]
    for row in rows:
        assert min(row[key] for key in ("op_us", "linear_us", "gb_per_s", "of read", "faster")) > 0
    first = rows[0]
    assert first["gb_per_s"] == pytest.approx(256 * 128 * 2 / first["op_us"] / 1e3)
    assert rows[1]["tflop_per_s"] == pytest.approx(33 * 2 * 256 * 128 / rows[1]["op_us"] / 1e6)
    assert rows[4]["gb_per_s"] == pytest.approx(2 * 16 * 64 * 2 / rows[4]["op_us"] / 1e3), "of two experts"
    assert "sizes as given, bfloat16, kernels: " in out
    result, _ = run(products, "--size", "256x128", "--kind", "int8", "int4_w4a8", "--rows", "3", "--seconds", "0")
    assert [row["kind"] for row in result["results"]] == ["int8", "int4_w4a8"]
    assert {layer.name: layer[1:3] for layer in products.layers_of("qwen3-0.6b")} == {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "lm_head": (151936, 1024),
    }


@pytest.mark.battery
@pytest.mark.parametrize("kind", ["int8_w8a8", "int8", "int4", "int4_w4a8", "fp8", "mxfp4"])
def test_quantised_products_of_a_gpu_in_tritons_interpreter(kind: str, tmp_path: Path) -> None:
    sizes = ["24x64", "16x64x4x2"]
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "compiled_llm", "bench", "products", "--kind", kind, "--size", *sizes]
    done = subprocess.run(
        [*command, "--rows", "1", "17", "--seconds", "0", "--rounds", "1", "--json", tmp_path / "a.json"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["machine"]["command"].startswith("compiled-llm bench products --kind ")
    assert [(row["layer"], row["rows"]) for row in result["results"]] == [(s, rows) for s in sizes for rows in (1, 17)]
    for row in result["results"]:
        assert row["left_out"] == {}
        assert "int_mm_us" not in row, "no kind has a scale for a whole row"


def test_a_wrong_product_ends_the_run_and_a_broken_other_way_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--size", "48x32", "--rows", "3", "--seconds", "0")
    packed_linear = products.packed_linear

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not for\nthis machine")

    monkeypatch.setattr(torch.nn.functional, "linear", broken)
    monkeypatch.setattr(products, "right", lambda layer, x, plain, route: x.float() @ plain.float().T)
    result, out = run(products, *words)
    assert result["results"][0]["left_out"] == {"linear": "RuntimeError: not for this machine"}
    assert "linear is left out: RuntimeError: not for this machine" in out
    monkeypatch.setattr(products, "packed_linear", lambda *given: packed_linear(*given) * 1.1)
    with pytest.raises(SystemExit, match="1"):
        products.main("it", list(words))
    assert "it: error: plain, 48x32, 3 rows: off by 0.1" in capsys.readouterr().err


@pytest.mark.battery
def test_a_start(tmp_path: Path) -> None:
    """On weights of a checkpoint that is written for it; what a start costs is no test's business."""
    words = (*TINY, "--bucket-sizes", "1", "--max-model-len", "64", "--num-kv-blocks", "8")
    with start.engine_arguments(start.parser("it").parse_args(words)) as arguments:
        assert arguments.keys() >= {"model", "enforce_eager", "bucket_sizes"}
        assert "load_format" not in arguments
        found = start.start(start.THIS, cache_directory(), arguments, tmp_path / "a.log")
    assert set(found["seconds"]) == set(start.STAGES)
    assert all(seconds >= 0 for seconds in found["seconds"].values())
    assert sum(found["seconds"].values()) == pytest.approx(found["total"], abs=0.01)
    assert (found["hits"], found["misses"], found["recompiles"], found["dtype"]) == (0, 0, 0, "bfloat16")
    assert "imported" in (tmp_path / "a.log").read_text()


def test_a_start_that_fails(tmp_path: Path) -> None:
    (tmp_path / "compiled_llm").mkdir()
    (tmp_path / "compiled_llm" / "__init__.py").write_text("raise SystemExit('no such model')")
    found = start.start(tmp_path, cache_directory(), {}, tmp_path / "b.log")
    assert "ended with status 1 after" in found["error"]
    assert found["log"] == ["no such model"]


def test_two_checkouts_start_in_turns(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "compiled_llm").mkdir()
    (tmp_path / "compiled_llm" / "__init__.py").touch()
    seen: list[tuple[Path, Path]] = []

    def started(checkout: Path, cache: Path, *given: Any, **options: Any) -> dict[str, Any]:
        seen.append((checkout, cache))
        total = 60.0 if len(seen) <= 2 else 10.0 + len(seen)
        figures = {"cpu": 1.0, "cpu of processes": 0.0, "load": 0.5, "hits": 0, "misses": 1, "dtype": "bfloat16"}
        figures |= dict.fromkeys(("tokens/s at first", "tokens/s compiled", "all compiled after"), 2.0)
        seconds = dict.fromkeys(start.STAGES, total / len(start.STAGES))
        return figures | {"seconds": seconds, "total": total, "tokens": [[len(seen)]]}

    monkeypatch.setattr(start, "start", started)
    result, out = run(start, "--demo", "--other", tmp_path, "--warm-runs", "3")
    assert [checkout for checkout, _ in seen] == [start.THIS, tmp_path] * 4
    assert len({cache for _, cache in seen}) == 2, "a warm start uses what the cold one left"
    assert (result["this"]["cold"]["total"], [one["total"] for one in result["this"]["warm"]]) == (60, [13, 15, 17])
    assert next(line for line in out.splitlines() if line.startswith("total")).split() == [
        "total",
        "60",
        "60",
        "15",
        "16",
    ]
    assert "this: cold and warm starts give OTHER TOKENS" in out


@pytest.mark.battery
def test_all_reduce(run: Run) -> None:
    result, _ = run(all_reduce, "--kib", "4,64", "--rounds", "1")
    assert [row["KiB"] for row in result["results"]] == [4, 64]
    assert all(row["op_us"] > 0 and row["gloo_us"] > 0 for row in result["results"])


def test_gpt_fast(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model with the interface of gpt-fast's."""
    (tmp_path / "model.py").write_text("""
import torch

class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(32, 8)
        self.output = torch.nn.Linear(8, 32, bias=False)
        self.seen = []

    @classmethod
    def from_name(cls, name):
        assert name == "tiny"
        return cls()

    def setup_caches(self, max_batch_size, max_seq_length):
        self.register_buffer("keys", torch.zeros(max_batch_size, max_seq_length, 8, dtype=torch.bfloat16))

    def forward(self, tokens, positions):
        assert self.keys.abs().sum() > 0
        self.seen.append(int(positions[0]))
        return self.output(self.tok_embeddings(tokens) + self.keys[:, positions])
""")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    models, load = [], gpt_fast.load
    monkeypatch.setattr(gpt_fast, "load", lambda args: models.append(load(args)) or models[0])
    words = ("--shape", "tiny", "--device", "cpu", "--eager", "--context", "6", "--tokens", "3")
    result, _ = run(gpt_fast, "--checkout", tmp_path, *words)
    assert models[0].seen == 7 * [6, 7, 8]
    assert len(result["token_ms_of_each"]) == 5
    assert result["weights_gb_per_s"] == pytest.approx(32 * 8 * 2 / result["token_ms"] / 1e6)
    monkeypatch.delitem(sys.modules, "model")


@pytest.mark.battery
def test_shared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    words = ("--num-kv-blocks", "70", "--progress", "off", "--seconds", "0.2", "--rounds", "2")
    result, _ = run(shared, *TINY, *words)
    assert list(result["rows"]) == ["alone", "one busy loop", "two busy loops", "two engines"]
    assert all(row["tokens_per_second"] > 0 and row["cores"] > 0 for row in result["rows"].values())
    assert [len(both) for both in result["rounds"]["two engines"]] == [2, 2]
    assert result["environment"]["GOMP_SPINCOUNT"] == "7"


class _Threads:
    """In the place of processes of their own, which would load torch again."""

    Process = threading.Thread

    @staticmethod
    def Pipe() -> tuple[Any, Any]:
        own, other = multiprocessing.Pipe()
        other.close = lambda: None  # type: ignore[method-assign]  # the thread has no other copy
        return own, other


@pytest.mark.battery  # requests arrive for seconds
def test_step_costs_are_what_the_plan_reads_and_requests_are_served_beside_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_costs.multiprocessing, "get_context", lambda method: _Threads)
    path, small = tmp_path / "costs.json", (*SMALL, "--token-bucket-sizes", "16,64", "--max-model-len", "128")
    result, out = run(step_costs, *small, "--costs", path, "--rounds", 1)
    assert [count for count, _ in result["costs"]["decode"]] == [1, 2, 3, 4]
    assert [tokens for tokens, _ in result["costs"]["chunk"]] == [1, 8, 16, 17, 40, 64]
    assert "prompts of 64" in out
    words = f"--models tiny --machines measured:1x1 --costs {path} --rate 1 --seconds 5 --slo scale:50"
    assert plan_command.main("compiled-llm plan", [*words.split(), "--prompt-tokens", "9", "--output-tokens", "9"]) == 0
    capsys.readouterr()

    lengths = ("--prompt-tokens", 20, "--output-tokens", 6, "--seconds", 5, "--rounds", 1, "--load", 0.05)
    result, _ = run(plan, *small, "--setups", "1x1", "--cvs", 1, *lengths, "--tolerance", 1e9)
    figures = {row["figure"]: row for row in result["rows"]}
    assert figures.keys() == {"attained", "ttft mean", "ttft p90", "e2el mean", "e2el p90"}
    assert figures["e2el mean"]["requests"] > 5
    assert 0 < figures["ttft mean"]["measured"] < figures["e2el mean"]["measured"]
