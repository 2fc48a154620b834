"""A conversation: what the prompts are, what is kept, and what is said when an answer ends early."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.offline.reading import RowReader
from compiled_llm.terminal.engine_conversation import EngineConversation

SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def conversation(engine: CompiledEngine, written: list[str] | None = None, **sampling: Any) -> EngineConversation:
    return EngineConversation(engine, {**SAMPLING, **sampling}, [].append if written is None else written.append)


def test_each_prompt_goes_on_from_the_one_before_and_finds_it_cached(engine: CompiledEngine) -> None:
    engine.reset_prefix_cache()
    written: list[str] = []
    talk = conversation(engine, written)
    first = "Read a file and return its lines as a list of strings"
    assert talk.say(first) == "cut at max_tokens=8: /set max_tokens 16, then /retry"
    answer = talk.messages[1]["content"]
    assert written[0] in answer
    (expected,) = engine.chat([{"role": "user", "content": first}], talk._params(100), use_tqdm=False)
    assert answer == expected.outputs[0].text
    talk.say("Now sort them")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    assert talk.last is not None
    assert talk.last.num_cached_tokens >= 16
    assert talk.num_tokens() > talk.last.num_prompt_tokens


def test_retry_answers_the_last_message_again(engine: CompiledEngine) -> None:
    talk = conversation(engine)
    with pytest.raises(ValueError, match="there is no message to answer again"):
        talk.retry()
    talk.say("a")
    before = list(talk.messages)
    talk.retry()
    assert talk.messages == before, "greedy"
    talk.set("temperature", 1.0)
    talk.retry()
    assert len(talk.messages) == 2
    assert talk.messages[0] == before[0]


def test_the_system_message_comes_first(engine: CompiledEngine) -> None:
    talk = conversation(engine)
    talk.system = "be brief"
    talk.messages = [{"role": "user", "content": "hello"}]
    assert talk._prompt().text == "# be brief\n# hello\ndef"


def test_a_full_context_is_told_and_nothing_is_dropped(engine: CompiledEngine) -> None:
    talk = conversation(engine, max_tokens=None)
    full = "the conversation has 256 tokens, and all the model's context holds is 256: /clear begins anew, /save FILE"
    assert str(talk.say("a")).startswith(full)
    kept = list(talk.messages)
    with pytest.raises(ValueError, match="all the model's context holds is 256: /clear begins anew"):
        talk.say("b")
    with pytest.raises(ValueError, match=r"/clear begins anew|too long"):
        talk.say("long " * 2000)
    assert talk.messages == kept


def test_an_interrupt_ends_the_answer_alone(engine: CompiledEngine) -> None:
    written: list[str] = []

    def write(piece: str) -> None:
        written.append(piece)
        if len(written) == 3:
            raise KeyboardInterrupt

    talk = EngineConversation(engine, {**SAMPLING, "max_tokens": 100}, write)
    assert "stopped" in str(talk.say("a"))
    assert not engine.has_unfinished_requests()
    assert talk.messages[1]["content"].startswith("".join(written[:3]))
    assert talk.last is not None
    assert "tokens/s" in talk.last.summary
    talk.retry()
    assert len(talk.messages) == 2


def test_a_signal_that_ends_the_program_is_no_ctrl_c(engine: CompiledEngine) -> None:
    def write(piece: str) -> None:
        raise KeyboardInterrupt(signal.SIGTERM)

    talk = EngineConversation(engine, {**SAMPLING, "max_tokens": 100}, write)
    with pytest.raises(KeyboardInterrupt):
        talk.say("a")
    assert not engine.has_unfinished_requests()


def test_an_interrupt_before_the_answer_keeps_the_conversation(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = EngineConversation(engine, {**SAMPLING, "max_tokens": 2}, lambda piece: None)
    talk.say("a")
    before = list(talk.messages)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "encode_chat", interrupted)
    for ask in (lambda: talk.say("b"), talk.retry):
        with pytest.raises(KeyboardInterrupt):
            ask()
        assert talk.messages == before


def test_without_a_template_turns_are_text(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.tokenizer is not None
    monkeypatch.setattr(engine.tokenizer, "chat_templates", {})
    talk = conversation(engine, stop="x")
    assert not talk.has_template
    talk.system = "Answer."
    talk.messages = [
        {"role": "user", "content": "Hello<|endoftext|>"},
        {"role": "assistant", "content": "Hi\n"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = talk._prompt()
    assert prompt.text == "Answer.\n\nUser:\nHello<|endoftext|>\n\nAssistant:\nHi\n\nUser:\nBye\n\nAssistant:\n"
    assert 0 not in prompt.token_ids, "a special token that the user spells is text"
    assert talk._params(20).stop == ("x", "\n\nUser:")
    talk.messages = [{"role": "user", "content": "word " * 1000}]
    with pytest.raises(ValueError, match="/clear begins anew"):
        talk._prompt()


def test_settings_are_checked_and_kept(engine: CompiledEngine) -> None:
    talk = conversation(engine)
    with pytest.raises(ValueError, match="temperature must be a number from 0"):
        talk.set("temperature", -1.0)
    assert talk.sampling == SAMPLING
    talk.set("min_tokens", 6)
    assert talk._params(3).min_tokens == 3, "no more than there is room for"
    with pytest.raises(ValueError, match="top_p"):
        conversation(engine, top_p=7)


def test_what_is_saved_is_a_row_for_batch(engine: CompiledEngine, tmp_path: Path) -> None:
    talk = conversation(engine)
    talk.system = "bé brief"
    talk.say("a")
    talk.save(tmp_path / "talk.jsonl")
    saved = json.loads((tmp_path / "talk.jsonl").read_text())
    assert saved["messages"] == [{"role": "system", "content": "bé brief"}, *talk.messages]
    (row,) = RowReader([str(tmp_path / "talk.jsonl")])
    assert row.error is None
    with pytest.raises(FileExistsError):
        talk.save(tmp_path / "talk.jsonl")
