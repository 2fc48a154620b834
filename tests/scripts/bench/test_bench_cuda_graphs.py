"""bench_cuda_graphs: two engines in turns, ratios and the check of tokens. Without a GPU it says so."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compiled_llm import CompiledEngine

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "bench_cuda_graphs.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("bench_cuda_graphs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, CompiledEngine]]:
    """Eager on the CPU, where the two modes are one; a start with another seed of the weights is a third."""
    arguments = {"device": "cpu", "enforce_eager": True, "bucket_sizes": (1, 4), "max_num_batched_tokens": 128}
    arguments |= {"max_model_len": 64, "num_kv_blocks": 16, "enable_prefix_caching": False}
    with CompiledEngine(**arguments) as one, CompiledEngine(**arguments, load_format="dummy", seed=1) as other:
        yield {"trees": one, "manual": one, "other": other}


def test_the_table(script: ModuleType, engines: dict[str, CompiledEngine], capsys: pytest.CaptureFixture[str]) -> None:
    pair = {mode: engines[mode] for mode in ("trees", "manual")}
    steps = engines["trees"].stats().num_steps
    row = script.compare(pair, batch_size=4, output_len=5, repeats=2)
    assert engines["trees"].stats().num_steps - steps == 2 * 3 * 5, "all prompts in one step, then all decode together"
    assert row["same_tokens"]
    assert [len(values) for values in row["step_seconds"].values()] == [2, 2]
    assert row["step_ratio"] == row["step_ms"]["trees"] / row["step_ms"]["manual"]
    assert row["step_ms"][row["faster"]] == min(row["step_ms"].values()) > 0
    script.print_table([row])
    assert "the same" in capsys.readouterr().out


def test_other_tokens_are_seen(script: ModuleType, engines: dict[str, CompiledEngine]) -> None:
    pair = {mode: engines[mode] for mode in ("trees", "other")}
    assert not script.compare(pair, batch_size=1, output_len=5, repeats=1)["same_tokens"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_cuda_graphs.py", "--shape", "tiny"])
    assert script.main() == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--output-len", "1"), ("--repeats", "0")])
def test_bad_flags(script: ModuleType, monkeypatch: pytest.MonkeyPatch, flag: str, value: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_cuda_graphs.py", flag, value])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code == 2
