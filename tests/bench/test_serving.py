"""The requests that the flags mean, from random tokens and from files, and transformers on the same requests."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.bench import hf as hf_backend
from compiled_llm.bench import serving, throughput
from compiled_llm.bench.workloads import WorkloadRequest
from compiled_llm.checkpoint.model_files import DEMO_MODEL


def requests(*arguments: str, model: tuple[str, ...] = ("--shape", "tiny")) -> Any:
    """Those that the flags mean for the tiny shape, or for another model."""
    args = throughput.parser("it").parse_args([*model, *arguments])
    with serving.described_model(args) as described:
        return serving.requests_of(args, described)


def lengths(requests: Any) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.output_len) for request in requests]


def test_transformers_continues_a_padded_prompt_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask and the padding are right: the demo model's greedy tokens are those of each prompt by itself."""
    hf = hf_backend.load(DEMO_MODEL, "float32", torch.device("cpu"), 0, random_weights=False)
    outputs = []
    generate = hf.generate
    monkeypatch.setattr(hf, "generate", lambda *a, **k: outputs.append(generate(*a, **k)) or outputs[-1])
    batch = [WorkloadRequest(list(range(50, 57)), 6), WorkloadRequest(list(range(90, 110)), 6)]
    hf_backend.run(hf, batch, 2)
    hf_backend.run(hf, batch, 1)
    assert outputs[0][:, -6:].tolist() == [alone[0, -6:].tolist() for alone in outputs[1:]]


def test_random_requests() -> None:
    some = requests("--num-prompts", "50", "--input-len", "20", "--output-len", "4", "--random-range-ratio", "0.5")
    assert len(some) == 50
    assert {i for i, _ in lengths(some)} <= set(range(10, 31))
    assert {o for _, o in lengths(some)} <= set(range(2, 7))
    assert len(set(lengths(some))) > 10
    exact = requests("--num-prompts", "3", "--random-input-len", "5", "--random-prefix-len", "7", "--seed", "1")
    assert lengths(exact) == [(12, 128)] * 3
    assert len({tuple(request.prompt_token_ids[:7]) for request in exact}) == 1
    assert len({tuple(request.prompt_token_ids[7:]) for request in exact}) == 3
    assert exact == requests("--num-prompts", "3", "--random-input-len", "5", "--random-prefix-len", "7", "--seed", "1")
    assert exact != requests("--num-prompts", "3", "--random-input-len", "5", "--random-prefix-len", "7", "--seed", "2")


def test_requests_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [{"prompt_token_ids": [1, 2, 3], "output_len": 4}, {"prompt": "import os", "output_len": 2}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    demo = ("--model", str(DEMO_MODEL))
    first, second = requests("--dataset-path", str(path), model=demo)
    assert first == ([1, 2, 3], 4)
    assert (len(second.prompt_token_ids) > 0, second.output_len) == (True, 2)
    assert requests("--dataset-path", str(path), "--num-prompts", "1", "--output-len", "9", model=demo) == [
        ([1, 2, 3], 9)
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "given none"),
        ('[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "given none"),
        ('[{"talk": []}]', "must be a JSON list of objects with conversations"),
        ("{", "must be a JSON list"),
    ],
)
def test_a_bad_file_of_conversations_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "talks.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        requests("--dataset-path", str(path), "--dataset-name", "sharegpt", model=("--model", str(DEMO_MODEL)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ('{"output_len": 1}', "either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt_token_ids": [1], "prompt": "a", "output_len": 1}', "either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt_token_ids": [1], "output_len": 1, "colour": "red"}', "unknown key: colour"),
        ('{"prompt_token_ids": [1]}', "output_len must be an integer of at least 1, given None"),
        ('{"prompt_token_ids": [1], "output_len": 0}', "given 0"),
        (
            '{"prompt_token_ids": [1000], "output_len": 1}',
            "prompt_token_ids must be integers from 0 to 999, given 1000",
        ),
        ('{"prompt_token_ids": [], "output_len": 1}', "must not be empty"),
        ('{"prompt": "a", "output_len": 1}', "no tokenizer"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt_token_ids": [1], "output_len": 1}\n' + row)
    with pytest.raises(ValueError, match=f"line 2: .*{re.escape(words.removeprefix('line 2: '))}"):
        requests("--dataset-path", str(path))
