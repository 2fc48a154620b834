"""Tool calls in the manner of OpenAI's API, whose arguments are JSON in a string: templates get what it spells."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from compiled_llm.text.chat import ChatEncoder
from compiled_llm.text.tokenizer import Tokenizer

# The parts of templates in use that write calls: of Qwen and Hermes, of Llama 3.1, of Mistral.
QWEN = """\
{%- for message in messages %}{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}
    {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
    {{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}
    {{- tool_call.arguments | tojson }}
    {{- '}</tool_call>' }}
{%- endfor %}{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"""
LLAMA = """\
{%- for message in messages %}{%- if 'tool_calls' in message %}
    {%- if not message.tool_calls|length == 1 %}{{- raise_exception("single tool-calls only") }}{%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- tool_call.name + ".call(" }}
    {%- for arg_name, arg_val in tool_call.arguments.items() %}
        {{- arg_name + '=' + arg_val | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}{{- ")" }}
{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"""
MISTRAL = """\
{%- for message in messages %}{%- if message.tool_calls is defined %}
    {{- "[TOOL_CALLS] [" }}
    {%- for tool_call in message.tool_calls %}
        {%- set out = tool_call.function | tojson %}
        {{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
    {%- endfor %}{{- "]" }}
{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"""

ARGUMENTS = {"city": 'Zürich <"北京"> 🚀', "days": [1, 2.5, None, True], "unit": {"temperature": "C"}}
SPELLED = json.dumps(ARGUMENTS, ensure_ascii=False)
WRITTEN = {
    QWEN: f'<tool_call>{{"name": "weather", "arguments": {SPELLED}}}</tool_call>',
    LLAMA: "weather.call("
    + ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in ARGUMENTS.items())
    + ")",
    MISTRAL: f'[TOOL_CALLS] [{{"name": "weather", "arguments": {SPELLED}, "id": "abcdefghi"}}]',
}
EMPTY = {
    QWEN: '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
    LLAMA: "weather.call()",
    MISTRAL: '[TOOL_CALLS] [{"name": "weather", "arguments": {}, "id": "abcdefghi"}]',
}
NAMES = {QWEN: "qwen", LLAMA: "llama", MISTRAL: "mistral"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatEncoder]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    directory: Path = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    made = ChatEncoder(Tokenizer(directory))
    yield made
    made.close()


def call_of(*arguments: Any) -> list[dict[str, Any]]:
    """A chat with one call; without ``arguments`` it has none."""
    function = {"name": "weather", **({"arguments": arguments[0]} if arguments else {})}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    return [{"role": "assistant", "content": None, "tool_calls": calls}]


def text_of(encoder: ChatEncoder, chat: list[dict[str, Any]], template: str) -> str:
    return encoder.encode(chat, 10_000, chat_template=template, add_generation_prompt=False)[0]


@pytest.mark.parametrize("template", NAMES, ids=NAMES.values())
def test_arguments_in_a_string_are_written_as_those_of_an_object(encoder: ChatEncoder, template: str) -> None:
    for arguments in (ARGUMENTS, SPELLED, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=2)):
        chat = call_of(arguments)
        given = copy.deepcopy(chat)
        assert text_of(encoder, chat, template) == WRITTEN[template]
        assert chat == given, "what was given is left as it is"


@pytest.mark.parametrize("template", NAMES, ids=NAMES.values())
def test_no_arguments_are_an_empty_object(encoder: ChatEncoder, template: str) -> None:
    for chat in (call_of(), *map(call_of, (None, "", " \n", "{}", "null", {}))):
        assert text_of(encoder, chat, template) == EMPTY[template]


@pytest.mark.parametrize("template", NAMES, ids=NAMES.values())
def test_no_calls_are_as_no_such_key(encoder: ChatEncoder, template: str) -> None:
    for calls in ([], None):
        chat = [{"role": "assistant", "content": "hello", "tool_calls": calls}]
        assert text_of(encoder, chat, template) == "hello"


def test_a_call_without_a_function_around_it_is_decoded_too(encoder: ChatEncoder) -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": SPELLED}]}]
    assert text_of(encoder, chat, QWEN) == WRITTEN[QWEN]


def test_other_values_than_objects_are_decoded_for_templates_that_write_them(encoder: ChatEncoder) -> None:
    assert '"arguments": [1, 2]}</tool_call>' in text_of(encoder, call_of("[1, 2]"), QWEN)
    with pytest.raises(ValueError, match="the chat template failed"):
        text_of(encoder, call_of("[1, 2]"), LLAMA)


def test_special_tokens_in_decoded_arguments_stay_text(encoder: ChatEncoder) -> None:
    spelled = json.dumps({"<|im_end|>": "<|im_end|>"}).replace("<|", "\\u003c|")
    text, token_ids = encoder.encode(call_of(spelled), 10_000, chat_template=QWEN)
    assert text.count("<|im_end|>") == 2
    assert len(token_ids) == len(text.encode())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{'city': 'Paris'}", "Expecting property name"),
        ('{"city": "Par', "Unterminated string"),
        ('{"a": NaN}', "NaN is no value of JSON"),
        ("[" * 100_000, "recursion"),
        ("1" * 5000, "digits"),
        ("get me the weather", "Expecting value"),
    ],
)
def test_a_string_that_is_not_json_is_refused(encoder: ChatEncoder, arguments: str, words: str) -> None:
    chat = [{"role": "user", "content": "hello"}, *call_of(arguments)]
    with pytest.raises(ValueError, match="arguments must be a dict") as error:
        text_of(encoder, chat, QWEN)
    assert str(error.value).startswith("messages[1]: tool_calls[0].function.arguments must be a dict")
    assert words in str(error.value)
    assert len(str(error.value)) < 500


def test_decoded_arguments_may_not_be_deeper_than_given_ones(encoder: ChatEncoder) -> None:
    with pytest.raises(ValueError, match="lists and dicts deep"):
        text_of(encoder, call_of("[" * 100 + "]" * 100), QWEN)
