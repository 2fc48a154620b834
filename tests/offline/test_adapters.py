"""Rows with adapters: by name in rows of ours, and as the model in OpenAI's."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.offline.order import OrderGain, ordered_for_speed
from compiled_llm.offline.rows import Row, row_to_json, with_adapter
from tests.adapters.made import write_adapter
from tests.offline.runs import FAST, run

FLAGS = [*FAST, "--enable-lora", "--max-loras", "1", "--max-lora-rank", "4", "--temperature", "0", "--quiet"]
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    shape = config.num_attention_heads * config.head_dim, config.hidden_size
    directory = tmp_path_factory.mktemp("adapters") / "a"
    return write_adapter(directory, {"model.layers.0.self_attn.q_proj": shape}, seed=0, lora_alpha=64)


def test_rows_name_their_adapters(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6}
    openai = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"model": "a", **body}}
    given = [{"prompt": PROMPT}, {"prompt": PROMPT, "lora": "a"}, openai, {"prompt": PROMPT, "lora": "b"}]
    given.append({**openai, "body": {"model": "any", **body}})
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in given))
    flags = ["--input", str(source), "--output", str(output), *FLAGS]
    assert run(*flags, "--lora-modules", f"a={adapter}") == 1
    found = [json.loads(line) for line in output.read_text().splitlines()]
    texts = {row["index"]: row["text"] for row in found if "text" in row}
    bodies = {row["id"]: row["response"]["body"]["choices"][0]["text"] for row in found if "response" in row}
    assert texts[0] == bodies["batch_req_4"] != texts[1] == bodies["batch_req_2"]
    (error,) = [row["error"]["message"] for row in found if "error" in row and "response" not in row]
    assert error == "lora must be a name that --lora-modules gives, given 'b'"

    # Another path of the same content is the same adapter, and another content another one.
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    assert run(*flags, "--resume", "--lora-modules", f"a={copy}") == 1
    (copy / "adapter_config.json").write_text((copy / "adapter_config.json").read_text().replace(": 64", ": 32"))
    capsys.readouterr()
    assert run(*flags, "--resume", "--lora-modules", f"a={copy}") == 2
    assert "the adapter a is another one (sha256" in capsys.readouterr().err
    assert run(*flags, "--resume") == 2
    assert "(sha256 None and was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--lora-modules", "a=b", "--enable-lora", "--check"], "--lora-modules cannot go with --check"),
        (["--lora-modules", "a=/none", "--enable-lora", "--output", "OUT"], "must be a directory with adapter_config"),
        (["--lora-modules", "a", "--enable-lora"], "lora_modules must be NAME=PATH"),
    ],
)
def test_refusals(flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*(str(tmp_path / "out") if flag == "OUT" else flag for flag in flags)) == 2
    assert words in capsys.readouterr().err


def test_rows_of_an_adapter_are_served_together() -> None:
    given = [Row(n, f"row {n}", prompt={"prompt": "x" * 400}, lora=(None, "a", "b")[n % 3]) for n in range(9)]
    given = [with_adapter(row, {"a", "b"}) for row in given]
    served = [row.lora for row in ordered_for_speed(iter(given), 100, 5, OrderGain())]
    assert len([1 for one, other in itertools.pairwise(served) if one != other]) == 2
    assert Row(**row_to_json(given[1])) == given[1]
