"""Whether engines compute the same model: the regret of tokens, and an engine that has another model."""

import json
import sys
from pathlib import Path

import pytest
import torch

from compiled_llm.bench import hf
from compiled_llm.bench.peers import check, checkpoints, compare, processes

# Replaces the Python of all: converts nothing. This engine's generates the tokens of a file beside it, llama.cpp's
# always token 7, and vLLM's fails.
FAKE = """#!{python}
import json, os, sys
if sys.argv[1].endswith("gguf_model.py"):
    open(sys.argv[3], "w").close()
    sys.exit()
if sys.argv[2] == "vllm":
    sys.exit("no such model")
print(json.dumps({{"versions": {{"fake": "1.0"}}}}), flush=True)
for line in sys.stdin:
    lens = [n for _, n in json.loads(line)]
    tokens = [[7] * n for n in lens]
    if sys.argv[2] == "engine":
        tokens = json.load(open(os.path.join(os.path.dirname(__file__), "tokens.json")))
    print(json.dumps({{"output_lens": lens, "token_ids": tokens}}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_the_regret_of_a_token_is_how_much_likelier_another_one_was(tmp_path: Path) -> None:
    checkpoints.write_checkpoint("tiny", tmp_path / "tiny")
    model = hf.load(tmp_path / "tiny", "float32", torch.device("cpu"), 0, random_weights=False)
    prompt = [5, 6, 7]
    tokens = hf.generate(model, [(prompt, 5)])[0, 3:].tolist()
    assert check.token_regrets(model, prompt, tokens).tolist() == [0] * 5
    other = [tokens[0], (tokens[1] + 1) % 1000, 3]
    log_probs = model(torch.tensor([prompt + other])).logits[0, 2:-1].log_softmax(-1)
    expected = torch.stack([log_probs[at].max() - log_probs[at, token] for at, token in enumerate(other)])
    found = check.token_regrets(model, prompt, other)
    torch.testing.assert_close(found, expected)
    assert found[1] > 0


def test_another_model_and_an_engine_that_fails_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake: Path, tmp_path: Path
) -> None:
    prompts = check.requests_of(check.DEMO_MODEL, 4)[:3]
    monkeypatch.setattr(check, "requests_of", lambda model, output_len: prompts)
    model = hf.load(check.DEMO_MODEL, "float32", torch.device("cpu"), 0, random_weights=False)
    tokens = [hf.generate(model, [one])[0, -4:].tolist() for one in prompts]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    monkeypatch.setattr(processes.sys, "executable", str(fake))
    peers = ["--llama-python", str(fake), "--vllm-python", str(fake), "--vllm-preload", "", "--most-regret", "0.1"]
    words = ["--check", "--threads", "1", "--output-len", "4", *peers, "--json", str(tmp_path / "out.json")]
    assert compare.main("compiled-llm bench peers", words) == 1
    out = capsys.readouterr().out
    assert out.count("ANOTHER MODEL") == 1
    assert "ANOTHER MODEL: llama.cpp has a mean regret of" in out
    assert "FAILED: vllm: ended with status 1; its last lines:\nno such model" in out
    engines = json.loads((tmp_path / "out.json").read_text())["engines"]
    assert engines["engine"]["regret"] == 0
    assert engines["engine"]["tokens"] == engines["llama.cpp"]["tokens"] == 12
    assert engines["llama.cpp"]["regret"] > 1
    assert engines["llama.cpp"]["agreement"] < engines["engine"]["agreement"]
