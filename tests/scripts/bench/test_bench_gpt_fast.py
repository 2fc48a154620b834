"""bench_gpt_fast on a model with the interface of gpt-fast's, on the CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_gpu_validate import ROOT, load

_MODEL = """
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
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    return load(ROOT / "scripts" / "bench" / "bench_gpt_fast.py")


def test_tokens_behind_a_context_are_timed(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = ["--checkout", tmp_path, "--shape", "tiny", "--device", "cpu", "--eager", "--context", 6, "--tokens", 3]
    monkeypatch.setattr(sys, "argv", ["bench_gpt_fast.py", *map(str, flags), "--json", str(tmp_path / "a.json")])
    models, load_model = [], bench.load
    monkeypatch.setattr(bench, "load", lambda args: models.append(load_model(args)) or models[0])
    assert bench.main() == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert models[0].seen == 7 * [6, 7, 8]
    assert len(result["token_ms_of_each"]) == 5
    assert result["weights_gb_per_s"] == pytest.approx(32 * 8 * 2 / result["token_ms"] / 1e6)
    monkeypatch.delitem(sys.modules, "model")


def test_a_folder_without_its_model_is_refused(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpt_fast.py", "--checkout", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "--checkout must be a folder with gpt-fast's model.py" in capsys.readouterr().err
