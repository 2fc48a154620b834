"""A model's own tokenizer, chat template and sampling suggestions are used, and what it lacks is said."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from compiled_llm import AsyncCompiledEngine, CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.text.prompts import EncodedPrompt
from tests.families import checkpoint

EAGER: dict[str, Any] = {
    "enforce_eager": True, "dtype": "float32", "bucket_sizes": (4,), "token_bucket_sizes": (32,),
    "num_kv_blocks": 65,
}  # fmt: skip
CHAT = [{"role": "user", "content": "Read a file\nand return its lines"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7, "eos_token_id": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER) as engine:
        yield engine


@pytest.fixture(scope="module")
def suggesting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with suggestions for sampling."""
    directory = shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("suggesting") / "model")
    (directory / "generation_config.json").write_text(json.dumps(QWEN3))
    return directory


# -- Chats of the demo model


def test_the_demo_model_chats(engine: CompiledEngine) -> None:
    (output,) = engine.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.prompt == "# Read a file\n# and return its lines\ndef"
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.startswith(" ")
    (as_text,) = engine.generate(output.prompt, GREEDY, use_tqdm=False)
    assert as_text.outputs[0].text == output.outputs[0].text


def test_a_conversation_of_the_demo_model_goes_on(engine: CompiledEngine) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    question = {"role": "user", "content": " Another? <|endoftext|>"}
    for answer in (" f():\n    pass\n", "def f():\n    pass"):
        conversation = [system, *CHAT, {"role": "assistant", "content": answer}]
        (output,) = engine.chat([*conversation, question], GREEDY, use_tqdm=False)
        assert output.prompt == (
            "# Be brief.\n# Read a file\n# and return its lines\ndef f():\n    pass\n\n\n# Another? <|endoftext|>\ndef"
        )
        assert engine.model_config.eos_token_ids[0] not in output.prompt_token_ids, "what a user spells stays text"
        options = {"add_generation_prompt": False, "continue_final_message": True}
        (output,) = engine.chat(conversation, GREEDY, use_tqdm=False, **options)
        assert output.prompt is not None
        assert output.prompt.endswith("def f():\n    pass")


# -- The tokenizer


def test_the_tokenizer_for_users_is_apart(engine: CompiledEngine) -> None:
    tokenizer = engine.get_tokenizer()
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True).endswith("\ndef")
    text = "def f(): <|endoftext|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer(text).input_ids[-1] == tokenizer.eos_token_id
    assert engine.tokenizer is not None
    before = engine.tokenizer.encode(text)
    assert before == tokenizer(text).input_ids
    assert engine.tokenizer.encode(text, True) == tokenizer(text, split_special_tokens=True).input_ids != before
    tokenizer(text, truncation=True, max_length=2)  # which changes it for good
    tokenizer.add_tokens(["def f"])
    assert engine.tokenizer.encode(text) == before
    assert engine.get_tokenizer()(text).input_ids[-1] == tokenizer.eos_token_id


def test_a_model_without_a_tokenizer_says_so_once_at_start(capfd: pytest.CaptureFixture[str]) -> None:
    with CompiledEngine(str(checkpoint("llama")), **EAGER) as engine:
        assert capfd.readouterr().err.count("has no tokenizer: it serves prompt_token_ids only") == 1
        engine.generate([[5, 6], [7]], GREEDY, use_tqdm=False)
        assert "tokenizer" not in capfd.readouterr().err
        with pytest.raises(ValueError, match="the model has no tokenizer: give the tokenizer argument"):
            engine.get_tokenizer()
    with CompiledEngine(**EAGER):
        assert "has no tokenizer" not in capfd.readouterr().err


# -- Sampling


def test_chat_follows_the_checkpoint_unless_it_is_told(suggesting: Path, capfd: pytest.CaptureFixture[str]) -> None:
    suggested = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    with CompiledEngine(str(suggesting), **EAGER) as engine:
        assert engine.get_default_sampling_params() == suggested
        (output,) = engine.chat(CHAT, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 7
        shown = "chat() samples as generation_config.json suggests: temperature=0.6, top_p=0.95, top_k=20, max_tokens=7"
        assert shown in capfd.readouterr().err
        (given,) = engine.chat(CHAT, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert len(given.outputs[0].token_ids) == 9
        (generated,) = engine.generate("def f", use_tqdm=False)
        assert len(generated.outputs[0].token_ids) == SamplingParams().max_tokens
        engine.chat(CHAT, use_tqdm=False)
        assert "generation_config" not in capfd.readouterr().err, "shown again, or for what did not follow it"


def test_what_a_checkpoint_suggests_beyond_that_is_named_at_the_start(tmp_path: Path) -> None:
    directory = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    fields = {"stop_strings": ["\n"], "min_new_tokens": 2, "num_beams": 4, "typical_p": 1.0, "eos_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match=r"generation_config\.json: fields .* are ignored: num_beams=4$") as warned:
        engine = CompiledEngine(str(directory), **EAGER)
    assert len(warned) == 1
    with engine:
        (output,) = engine.chat(CHAT, use_tqdm=False)
        assert engine.get_default_sampling_params() == SamplingParams(stop=["\n"], min_tokens=2)
        assert "\n" not in output.outputs[0].text


def test_a_checkpoint_that_suggests_nothing_changes_nothing(
    engine: CompiledEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert engine.get_default_sampling_params() == SamplingParams()
    engine.chat(CHAT, use_tqdm=False)
    assert "generation_config" not in capfd.readouterr().err


def test_a_bad_suggestion_stops_nobody_who_gives_parameters(tmp_path: Path) -> None:
    directory = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"temperature": "hot", "eos_token_id": 0}))
    with CompiledEngine(str(directory), **EAGER) as engine:
        with pytest.raises(ValueError, match=r"generation_config\.json: temperature must be .*, given 'hot': give"):
            engine.chat(CHAT, use_tqdm=False)
        assert engine.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_asyncio_has_the_same(suggesting: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> RequestOutput:
        async with AsyncCompiledEngine(str(suggesting), **EAGER) as engine:
            assert (await engine.get_default_sampling_params()).top_k == 20
            assert (await engine.get_tokenizer())("def").input_ids
            return [output async for output in engine.chat(CHAT)][-1]

    output = asyncio.run(asyncio.wait_for(main(), 60))
    assert len(output.outputs[0].token_ids) == 7
    assert "chat() samples as generation_config.json suggests" in capfd.readouterr().err


def test_max_tokens_none_is_up_to_the_capacity(engine: CompiledEngine) -> None:
    capacity = engine.scheduler.request_capacity
    prompt = [5] * (capacity - 9)
    unbounded = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    (generated,) = engine.generate(prompt, unbounded, use_tqdm=False)
    *_, streamed = engine.stream(prompt, unbounded)
    (beams,) = engine.beam_search(prompt, 2, None, ignore_eos=True)
    template = "{{ 'a' * 3000 }}{{ messages[0].content }}"
    (chatted,) = engine.chat(CHAT, unbounded, use_tqdm=False, chat_template=template)
    for output in (generated, streamed, beams, chatted):
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == capacity
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1, or None, given 0"):
        engine.beam_search(prompt, 2, 0)


# -- Long prompts


def test_only_the_end_of_a_long_prompt_is_served(engine: CompiledEngine) -> None:
    assert engine.tokenizer is not None
    text = "import os\n" * 50 + "def read(path):"
    token_ids = engine.tokenizer.encode(text)
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=6, prompt_logprobs=0)
    (expected,) = engine.generate([token_ids[-6:]], params, use_tqdm=False)
    *_, streamed = engine.stream(text, params)
    prompts = [text, token_ids, {"prompt": text, "cache_salt": "a"}, EncodedPrompt(text, token_ids)]
    for output in (*engine.generate(prompts, params, use_tqdm=False), streamed):
        assert output.prompt_token_ids == token_ids[-6:]
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 6
    (chatted,) = engine.chat(CHAT, params, use_tqdm=False)
    assert len(chatted.prompt_token_ids) == 6
    (short,) = engine.generate([[5, 6]], params, use_tqdm=False)
    assert short.prompt_token_ids == [5, 6]


def test_as_much_as_fits_leaves_room_for_one_token(engine: CompiledEngine) -> None:
    capacity = engine.scheduler.request_capacity
    params = SamplingParams(temperature=0, truncate_prompt_tokens=-1, ignore_eos=True)
    (output,) = engine.generate("x = [" * 200_000, params, use_tqdm=False)  # more text than a request may have
    assert (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == (capacity - 1, 1)


def test_more_than_ever_fits_is_refused(engine: CompiledEngine) -> None:
    capacity = engine.scheduler.request_capacity
    params = SamplingParams(truncate_prompt_tokens=capacity)
    with pytest.raises(ValueError, match=f"truncate_prompt_tokens must be below {capacity}, .* given {capacity}"):
        engine.generate("a", params, use_tqdm=False, raise_on_error=True)


def test_an_abort_before_the_first_token_tells_the_prompt_that_was_kept() -> None:
    async def main() -> RequestOutput:
        async with AsyncCompiledEngine(**EAGER) as engine:
            params = SamplingParams(truncate_prompt_tokens=3)
            outputs = engine.generate([5, 6, 7, 8, 9], params, request_id="mine")
            await engine.ready()
            commands, busy = engine._thread._commands, threading.Event()
            engine._thread.call(lambda _: busy.wait(60))  # so that no step comes between the next two
            while commands.qsize():
                await asyncio.sleep(0.001)
            first = asyncio.ensure_future(anext(outputs))
            while commands.qsize() < 2:  # its name, and the request itself when it is prepared
                await asyncio.sleep(0.001)
            abort = asyncio.ensure_future(engine.abort("mine"))
            while commands.qsize() < 3:
                await asyncio.sleep(0.001)
            busy.set()
            await abort
            output = await first
            assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
            return output

    output = asyncio.run(asyncio.wait_for(main(), 60))
    assert output.prompt_token_ids == [7, 8, 9]
