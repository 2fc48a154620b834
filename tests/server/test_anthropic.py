"""Anthropic's own client against a server: messages, whole and streamed, are what ``chat`` gives."""

from typing import Any

import anthropic
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.server.settings import DEMO_NAME
from tests.server.conftest import Running

CHAT: Any = [{"role": "user", "content": "Return the larger of two numbers"}]
GREEDY: Any = {"model": DEMO_NAME, "max_tokens": 12, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=60)


def test_a_message_is_a_chat(reference: CompiledEngine, client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be short"}]
    (wanted,) = reference.chat(
        [{"role": "system", "content": "Be short"}, *CHAT], SamplingParams(temperature=0, max_tokens=12)
    )
    answer = client.messages.create(messages=CHAT, system=system, **GREEDY)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", wanted.outputs[0].text)
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    assert answer.id.startswith("msg_")
    usage = answer.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (
        len(wanted.prompt_token_ids),
        12,
    )
    with client.messages.stream(messages=CHAT, system=system, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        assert "".join(stream.text_stream) == ""
        final = stream.get_final_message()
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
