"""Special tokens in prompts, as stop strings, as bad words, and the end-of-text token that only the tokenizer knows."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from tests.offline.runs import run

EAGER: dict[str, Any] = {
    "enforce_eager": True, "dtype": "float32", "bucket_sizes": (4,), "token_bucket_sizes": (32,),
    "num_kv_blocks": 65,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SPLIT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, split_special_tokens=True)
END = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}<|endoftext|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}# def"
CHAT = [{"role": "user", "content": "Read a file"}, {"role": "assistant", "content": f"it spells {END}"}]
HIDDEN = "self"  # made special


def changed(directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> Path:
    shutil.copytree(DEMO_MODEL, directory)
    for name, change in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        content = json.loads((directory / name).read_text()) | change
        (directory / name).write_text(json.dumps(content))
    (directory / "generation_config.json").unlink()
    return directory


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER) as engine:
        yield engine


# -- Prompts


def test_a_rendered_chat_has_the_tokens_of_the_chat(engine: CompiledEngine) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "it does"}]
    (chatted,) = engine.chat(chat, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    text = chatted.prompt
    assert text is not None
    assert chatted.prompt_token_ids.count(0) == 4
    (whole,) = engine.generate(text, GREEDY, use_tqdm=False)
    (in_dict,) = engine.generate({"prompt": text, "cache_salt": "a"}, GREEDY, use_tqdm=False)
    *_, streamed = engine.stream(text, GREEDY)
    (beams,) = engine.beam_search(text, 2, 2)
    (scored,) = engine.score(text, " x", use_tqdm=False)
    (split,) = engine.generate(text, SPLIT, use_tqdm=False)
    for output in (whole, in_dict, streamed, beams):
        assert output.prompt_token_ids == chatted.prompt_token_ids
    assert whole.outputs == streamed.outputs == chatted.outputs
    assert scored.token_ids[: len(chatted.prompt_token_ids)] == chatted.prompt_token_ids
    assert 0 not in split.prompt_token_ids
    assert len(split.prompt_token_ids) > len(chatted.prompt_token_ids)
    (beams,) = engine.beam_search(text, 2, 2, split_special_tokens=True)
    assert beams.prompt_token_ids == split.prompt_token_ids
    (scored,) = engine.score(text, " x", use_tqdm=False, split_special_tokens=True)
    assert 0 not in scored.token_ids


def test_messages_are_text_whatever_is_asked_for(engine: CompiledEngine) -> None:
    for params in (GREEDY, SPLIT, SamplingParams(max_tokens=1, split_special_tokens=False)):
        (output,) = engine.chat(CHAT, params, use_tqdm=False, chat_template=TEMPLATE)
        assert output.prompt_token_ids.count(0) == 4, "those of the template"


def test_the_engine_argument_is_what_a_request_does_not_say() -> None:
    async def main() -> None:
        async with AsyncCompiledEngine(split_special_tokens=True, **EAGER) as engine:
            for split, count in ((None, 0), (True, 0), (False, 1)):
                params = SamplingParams(max_tokens=1, split_special_tokens=split)
                *_, output = [output async for output in engine.generate(f"x{END}", params)]
                assert output.prompt_token_ids.count(0) == count
                scored = await engine.score(f"x{END}", " y", split_special_tokens=split)
                assert scored.token_ids.count(0) == count

    asyncio.run(asyncio.wait_for(main(), 60))


def test_rows_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both formats, and what the manifest has of it."""
    body = {"prompt": f"x{END}", "max_tokens": 1, "prompt_logprobs": 0}
    given = [
        {"prompt": f"x{END}"},
        {"prompt": f"x{END}", "sampling_params": {"split_special_tokens": True}},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": body | {"split_special_tokens": True}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    flags = ["--input", str(tmp_path / "in.jsonl"), "--enforce-eager", "--bucket-sizes", "4", "--quiet"]
    flags += ["--max-tokens", "1", "--output", str(tmp_path / "out.jsonl")]
    assert run(*flags) == 0
    assert "tokens       20 of prompts" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines if "response" in line}
    assert {name: body["usage"]["prompt_tokens"] for name, body in bodies.items()} == {"a": 2, "b": 8}
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["engine"]["split_special_tokens"] is False
    assert run(*flags, "--resume", "--split-special-tokens") == 2
    assert "--split-special-tokens is True and was False" in capsys.readouterr().err


# -- Stop strings and bad words


def test_a_stop_string_that_is_a_special_token_stops_in_any_batch(tmp_path: Path) -> None:
    directory = changed(tmp_path / "model", {}, {"additional_special_tokens": [HIDDEN]})
    with CompiledEngine(str(directory), **EAGER) as engine:
        assert engine.tokenizer is not None
        token_id = engine.tokenizer.special_tokens[HIDDEN].token_id
        prompt = "class A:\n    def __init__("
        params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        (free,) = engine.generate(prompt, SamplingParams(**params), use_tqdm=False)
        (shown,) = engine.generate(prompt, SamplingParams(**params, skip_special_tokens=False), use_tqdm=False)
        ids = free.outputs[0].token_ids
        assert HIDDEN in shown.outputs[0].text
        assert HIDDEN not in free.outputs[0].text
        place = ids.index(token_id)
        rest = shown.outputs[0].text[shown.outputs[0].text.index(HIDDEN) + len(HIDDEN) :]
        for stop, num_tokens, include in ((HIDDEN, place + 1, True), (HIDDEN + rest[0], place + 2, False)):
            stopping = SamplingParams(**params, stop=stop, include_stop_str_in_output=include)
            *_, streamed = engine.stream(prompt, stopping)
            others = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
            batch = engine.generate([prompt, "import os", prompt], [stopping, others, stopping], use_tqdm=False)
            for output in (streamed, batch[0], batch[2]):
                completion = output.outputs[0]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
                assert completion.token_ids == ids[:num_tokens]
                assert completion.text == engine.tokenizer.decode(ids[:place]) + (stop if include else "")


def test_a_special_token_is_a_bad_word(engine: CompiledEngine) -> None:
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logit_bias": {0: 100.0}}
    (output,) = engine.generate("x", SamplingParams(**params), use_tqdm=False)
    assert output.outputs[0].token_ids == [0, 0, 0, 0]
    (output,) = engine.generate("x", SamplingParams(**params, bad_words=(END,)), use_tqdm=False)
    assert 0 not in output.outputs[0].token_ids
    as_text = SamplingParams(**params, bad_words=(END,), split_special_tokens=True)
    assert engine.generate("x", as_text, use_tqdm=False)[0].outputs[0].token_ids == [0, 0, 0, 0]


# -- The end of text


def test_the_tokenizers_end_of_text_ends_where_the_configs_name_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = changed(tmp_path / "model", {"eos_token_id": None}, {})
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={0: 100.0})
    with CompiledEngine(str(directory), **EAGER) as engine:
        said = (
            "config.json and generation_config.json name no end-of-text token: the tokenizer's, '<|endoftext|>', ends"
        )
        assert capfd.readouterr().err.count(said) == 1
        assert engine.model_config.eos_token_ids == (0,)
        (output,) = engine.generate("x", params, use_tqdm=False)
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("stop", [0])
        (beams,) = engine.beam_search("x", 2, 3)
        assert beams.outputs
    directory = changed(tmp_path / "none", {"eos_token_id": None}, {"eos_token": None})
    with CompiledEngine(str(directory), **EAGER) as engine:
        assert engine.model_config.eos_token_ids == ()
        assert "end-of-text" not in capfd.readouterr().err
