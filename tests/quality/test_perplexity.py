"""Perplexity against transformers' own, the windows, what is put before them, and texts that cannot be scored."""

import contextlib
import json
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, RequestsFailedWarning
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.commands.report.perplexity import main
from compiled_llm.quality import perplexity
from compiled_llm.quality.perplexity import Encoded, cut, encode
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.worker.runner import ModelRunner


@pytest.fixture(scope="module")
def _shared() -> Iterator[CompiledEngine]:
    sizes = {"bucket_sizes": (8,), "token_bucket_sizes": (512,), "max_model_len": 256, "num_kv_blocks": 128}
    with CompiledEngine(enforce_eager=True, dtype="float32", progress="off", **sizes) as engine:
        yield engine


@pytest.fixture(autouse=True)
def engine(_shared: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> CompiledEngine:
    """The engine that the command gets, whatever its flags say of it."""
    monkeypatch.setattr(CompiledEngine, "from_config", lambda config: contextlib.nullcontext(_shared))
    return _shared


@pytest.fixture(scope="module")
def of_transformers() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_bytes(("# größer\r\n" + Path(textwrap.__file__).read_text()[:2100]).encode())
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict:
    """The JSON line; of a run that ends early, its status and what it says on stderr."""
    try:
        status = main("compiled-llm report perplexity", list(map(str, words)))
    except SystemExit as early:
        return {"status": early.code, "error": capsys.readouterr().err}
    assert status == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def by_transformers(model: Any, token_ids: list[int], prefix: list[int], window: int, stride: int) -> tuple[float, int]:
    """Mean loss and number of tokens, as transformers' documentation computes them: overlapping windows, one by one."""
    losses, scored_until = [], 0 if prefix else 1
    for begin in range(0, len(token_ids), stride):
        end = min(begin + window - len(prefix), len(token_ids))
        inputs = torch.tensor([prefix + token_ids[begin:end]])
        targets = inputs.clone()
        targets[:, : -(end - scored_until)] = -100
        with torch.no_grad():
            loss = model(inputs, labels=targets).loss
        losses.append(loss.double() * (end - scored_until))
        scored_until = end
        if end == len(token_ids):
            break
    num_scored = len(token_ids) - (0 if prefix else 1)
    return float(sum(losses) / num_scored), num_scored


@pytest.mark.parametrize(
    ("words", "prefix", "window", "stride"),
    [
        pytest.param((), [], 256, 128, marks=pytest.mark.battery),
        (("--window", "100", "--stride", "30"), [], 100, 30),
        pytest.param(
            ("--window", "64", "--stride", "63", "--prefix-token-ids", "0"), [0], 64, 63, marks=pytest.mark.battery
        ),
        pytest.param(("--stride", "250", "--prefix-token-ids", "5,6"), [5, 6], 256, 250, marks=pytest.mark.battery),
    ],
)
def test_equal_to_transformers(
    capsys: pytest.CaptureFixture[str],
    text: Path,
    of_transformers: Any,
    words: tuple[str, ...],
    prefix: list[int],
    window: int,
    stride: int,
) -> None:
    found = run(capsys, "--text", text, *words)
    written = text.read_bytes().decode()
    token_ids = Tokenizer(DEMO_MODEL).encode(written)
    assert len(token_ids) > 500
    loss, num_scored = by_transformers(of_transformers, token_ids, prefix, window, stride)
    assert (found["tokens"], found["window"], found["stride"]) == (num_scored, window, stride)
    assert found["prefix_token_ids"] == prefix
    assert found["nats_per_token"] == pytest.approx(loss, rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_token"] == pytest.approx(loss / math.log(2), rel=1e-4)
    num_bytes = len(text.read_bytes()) - (0 if prefix else len("#"))
    assert found["bytes"] == num_bytes
    assert found["bits_per_byte"] == pytest.approx(loss * num_scored / math.log(2) / num_bytes, rel=1e-4)


def test_every_token_is_scored_once_with_as_many_before_it_as_was_said() -> None:
    for num_tokens in (2, 3, 9, 10, 11, 12, 50, 99):
        for prefix in ([], [7], [7, 8]):
            for length in range(len(prefix) + 2, 14):
                size = length - len(prefix)
                for stride in range(1, size + bool(prefix)):
                    encoded = Encoded(prefix, list(range(num_tokens)), 1)
                    windows = list(cut(encoded, length, stride))
                    scored = [token for window in windows for token in range(window.start, window.end)]
                    assert scored == list(range(0 if prefix else 1, num_tokens))
                    assert all(0 < window.end - window.begin <= size for window in windows)
                    assert all(window.start - window.begin + len(prefix) > 0 for window in windows)
                    assert all(window.start - window.begin >= size - stride for window in windows[1:])


def test_what_a_tokenizer_puts_before_a_text_is_put_before_each_window() -> None:
    class WithBegin:
        """One that puts tokens around a text."""

        def __init__(self) -> None:
            self.inner = Tokenizer(DEMO_MODEL)
            self.encode_piece, self.decode = self.inner.encode, self.inner.decode

        def encode(self, text: str) -> list[int]:
            return [1, *self.inner.encode(text), 2]

    written = "größer = 1\n"
    token_ids = Tokenizer(DEMO_MODEL).encode(written)
    assert encode(written, WithBegin(), None) == ([1], token_ids, len(written.encode()))
    assert encode(written, WithBegin(), [9]) == ([9], token_ids, len(written.encode()))
    assert encode(written, Tokenizer(DEMO_MODEL), None) == ([], token_ids, len(written.encode()) - 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stride", "256"), "--stride must be at most 255, so that some token is before each"),
        (("--window", "257"), "--window must be at most 256, the tokens of a request, given 257"),
        (("--window", "1"), "--window must be at least 2, for 0 prefix tokens"),
        (("--window", "2", "--prefix-token-ids", "1,2"), "--window must be at least 3, for 2 prefix tokens"),
    ],
)
def test_windows_that_are_refused(
    capsys: pytest.CaptureFixture[str], text: Path, words: tuple[str, ...], message: str
) -> None:
    found = run(capsys, "--text", text, *words)
    assert found["status"] == 2
    assert message in found["error"]


def test_texts_that_cannot_be_scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "text"
    for data, message in [(b"", "at least 2 tokens, given 0"), (b"#", "at least 2 tokens"), (b"\xff", "utf-8")]:
        path.write_bytes(data)
        found = run(capsys, "--text", path)
        assert found["status"] == 2
        assert message in found["error"]
    assert run(capsys, "--text", tmp_path / "none")["status"] == 2
    path.write_bytes(b"import os\n" * 20)
    found = run(capsys, "--text", path, "--prefix-token-ids", "99999")
    assert found["status"] == 2
    assert "integers from 0 to 4095, given 99999" in found["error"]

    def broken(runner: ModelRunner, step: object) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(ModelRunner, "collect", broken)
    with pytest.warns(RequestsFailedWarning):
        found = run(capsys, "--text", path)
    assert found["status"] == 1
    said = r"compiled-llm report perplexity: error: tokens 0 to \d+: RuntimeError: the device is on fire\n"
    assert re.fullmatch(said, found["error"])


def test_a_json_file(
    engine: CompiledEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(perplexity, "WINDOWS_AT_ONCE", 3)
    found = run(capsys, "--text", text, "--stride", "100", "--json", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == found
    (first,) = engine.score([Tokenizer(DEMO_MODEL).encode(text.read_bytes().decode())[:256]], use_tqdm=False)
    assert -sum(first.logprobs) < found["nats_per_token"] * found["tokens"]
