"""B10: bad inputs through the public interface. Each is refused in words that help, and costs nobody else anything.

What is refused says what it is about, what is allowed and what was given. After each one the engine serves a control
request, with the tokens that it had before, and no KV block is used.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams

CONTROL = "def add(a, b):\n    return"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
USER = {"role": "user", "content": "Hello"}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
HALF = "\ud800"  # of a surrogate pair
LENGTH = 128

# (prompt, what the reason matches)
PROMPTS: list[tuple[Any, str]] = [
    ("", r"prompt must not be empty, given ''"),
    ([], r"prompt must have at least one token, given none"),
    ((), r"prompt must have at least one token, given none"),
    ({"prompt": ""}, r"prompt must not be empty"),
    ({"prompt_token_ids": []}, r"prompt must have at least one token, given none"),
    ([5, 10**6], r"prompt_token_ids must be integers from 0 to 4095, given 1000000"),
    ([4096], r"prompt_token_ids must be integers from 0 to 4095, given 4096"),
    ([-1], r"prompt_token_ids .* given -1"),
    ([5, 1.5], r"prompt_token_ids .* given 1.5"),
    ([2**70], r"prompt_token_ids .* given 1180591620717411303424"),
    ([math.nan], r"prompt_token_ids .* given nan"),
    ([5, True], r"prompt_token_ids .* given True"),
    ([5, None], r"prompt_token_ids .* given None"),
    ([5, "x"], r"prompt_token_ids .* given 'x'"),
    ([[5], 6], r"prompt_token_ids .* given \[5\]"),
    ({"prompt_token_ids": [5, "x"]}, r"prompt_token_ids .* given 'x'"),
    ([5] * LENGTH, r"prompt must be shorter than 128 tokens \(the max_model_len; .* given 128"),
    ("x " * 5 * LENGTH, r"prompt must be shorter than 128 tokens .* given"),
    ("x" * 10**6, r"prompt is too long: 1000000 characters cannot be less than 128 tokens"),
    ({"prompt": 5}, r"prompt must be a str"),
    ({"prompt": [5]}, r"prompt must be a str"),
    ({"prompt_token_ids": "x"}, r"prompt_token_ids must be a list"),
    ({"prompt_token_ids": 5}, r"must be .* a list of token ids .* given int"),
    ({}, r"a prompt given as a dict must have one key, 'prompt' or 'prompt_token_ids'.* given \[\]"),
    ({"text": "x"}, r"one key, 'prompt' or 'prompt_token_ids'.* given \['text'\]"),
    ({"prompt": "x", "prompt_token_ids": [1]}, r"one key.* given \['prompt', 'prompt_token_ids'\]"),
    ({"prompt": "x", "salt": "y"}, r"beside an optional 'cache_salt', given \['prompt', 'salt'\]"),
    ({"prompt": "x", "cache_salt": 5}, r"cache_salt must be a str of at most 1024 characters, given 5"),
    ({"prompt": "x", "cache_salt": "x" * 2000}, r"cache_salt must be a str of at most 1024 characters, given 'xxx"),
    ({"prompt": "x", "cache_salt": HALF}, r"cache_salt must be valid Unicode"),
    (HALF, r"prompt must be valid Unicode"),
    (None, r"prompt must be a str, a list of token ids or a dict, given NoneType"),
    (5, r"prompt must be a str, .* given int"),
    (1.5, r"prompt must be a str, .* given float"),
    (b"x", r"prompt must be a str, .* given bytes"),
    ({"x"}, r"prompt must be a str, .* given set"),
    (np.array([1, 2]), r"prompt must be a str, .* given ndarray"),
]

# (arguments of SamplingParams, what the message matches), of what only the engine knows. What is refused when they, or
# the arguments of an engine, are made is in tests/api.
PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [4096]}, r"stop_token_ids must be integers from 0 to 4095, given 4096"),
    ({"allowed_token_ids": [5, 10**6]}, r"allowed_token_ids must be integers from 0 to 4095, given 1000000"),
    ({"logit_bias": {2**31 - 1: 1.0}}, r"logit_bias must be integers from 0 to 4095, given 2147483647"),
    ({"logprobs": 21}, r"logprobs must be at most the engine's max_logprobs, 20, given 21"),
    ({"prompt_logprobs": 1000}, r"prompt_logprobs must be at most .* 20, given 1000"),
    ({"logits_transforms": {"loud": 1}}, r"logits_transforms must name some of the engine's, \[\], given 'loud'"),
    ({"allowed_token_ids": [0], "min_tokens": 2}, r"allowed_token_ids, bad_words and min_tokens leave no token"),
    ({"bad_words": [HALF]}, r"bad_words must be valid Unicode, given '\\ud800'"),
    ({"structured_outputs": {"regex": "("}}, r"structured outputs: does not compile: .*unclosed group"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, r"structured outputs: does not compile: "),
    ({"structured_outputs": {"grammar": "x"}}, r"structured outputs: does not compile: .*Expected token ':'"),
    ({"structured_outputs": {"grammar": 'start: "a" missing'}}, r"structured outputs: does not compile: .*missing"),
    ({"structured_outputs": {"json": {"type": "nosuch"}}}, r"structured outputs: does not compile: .*nosuch"),
    ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, r"structured outputs: does not compile: .*nowhere"),
]

# (arguments of chat, what the reason matches)
CHATS: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [], "chat_template": TEMPLATE},
        r"messages must be a list of one or more dicts .* given an empty one",
    ),
    ({"messages": "Hello", "chat_template": TEMPLATE}, r"messages must be a list .* given str"),
    ({"messages": ["Hello"], "chat_template": TEMPLATE}, r"messages\[0\] must be a dict with 'role' .* given str"),
    ({"messages": [{"content": "x"}], "chat_template": TEMPLATE}, r"messages\[0\]: role must be .* given None"),
    ({"messages": [{"role": "a\nb", "content": "x"}], "chat_template": TEMPLATE}, r"role must be .* given 'a\\nb'"),
    ({"messages": [{"role": "user"}], "chat_template": TEMPLATE}, r"messages\[0\]: content must be a str"),
    ({"messages": [{"role": "user", "content": 5}], "chat_template": TEMPLATE}, r"content must be .* given int"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "chat_template": TEMPLATE},
        r"a part must have the type 'text', .* given \{'type': 'image'\}",
    ),
    ({"messages": [{"role": "user", "content": HALF}], "chat_template": TEMPLATE}, r"messages must be valid Unicode"),
    ({"messages": [USER], "chat_template": "{% for"}, r"chat.template"),
    ({"messages": [USER], "chat_template": "{{ 1 / 0 }}"}, r"chat.template"),
    ({"messages": [USER], "chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, r"chat.template"),
    ({"messages": [USER], "chat_template": "{{ messages.__class__.__mro__ }}"}, r"chat.template"),
    ({"messages": [USER], "chat_template": 5}, r"chat_template must be a str, given int"),
    ({"messages": [USER], "chat_template": TEMPLATE, "tools": [{}]}, r"the chat template has no use for 'tools'"),
    ({"messages": [USER], "chat_template": TEMPLATE, "tools": 5}, r"tools must be a list of dicts, given 5"),
    (
        {"messages": [USER], "chat_template": TEMPLATE, "chat_template_kwargs": {"messages": []}},
        r"chat_template_kwargs must not have 'messages'",
    ),
    (
        {"messages": [USER], "chat_template": TEMPLATE, "continue_final_message": True},
        r"continue_final_message=True needs add_generation_prompt=False",
    ),
    (
        {"messages": [{"role": "user", "content": "x " * 500}], "chat_template": TEMPLATE},
        r"prompt must be shorter than 128 tokens .* given \d+",
    ),
    (
        {"messages": [{"role": "user", "content": "x" * 10**6}], "chat_template": TEMPLATE},
        r"messages are too long: \d+ characters cannot be less than 128 tokens",
    ),
    ({"messages": [USER], "chat_template": "{{ '' }}"}, r"prompt must have at least one token, given none"),
]

Use = Callable[[CompiledEngine], Any]

# Arguments of the methods.
CALLS: list[tuple[str, Use, str]] = [
    (
        "fewer parameters than prompts",
        lambda engine: engine.generate([CONTROL] * 2, [GREEDY], use_tqdm=False),
        r"sampling_params must be one or as many as the prompts, 2, given 1",
    ),
    (
        "parameters as a dict",
        lambda engine: engine.generate(CONTROL, {"temperature": 0}, use_tqdm=False),  # type: ignore[arg-type]
        r"sampling_params must be a SamplingParams or a list, given dict",
    ),
    (
        "a dict among the parameters",
        lambda engine: engine.generate([CONTROL], [{"temperature": 0}], use_tqdm=False),  # type: ignore[list-item]
        r"sampling_params must be a SamplingParams, given dict",
    ),
    (
        "more priorities than prompts",
        lambda engine: engine.generate(CONTROL, GREEDY, priority=[0, 0], use_tqdm=False),
        r"priority must have as many integers as there are prompts, 1, given 2",
    ),
    (
        "a priority alone",
        lambda engine: engine.generate(CONTROL, GREEDY, priority=1, use_tqdm=False),  # type: ignore[arg-type]
        r"priority must be a list of integers, one for each prompt, given 1",
    ),
    (
        "a priority that counts for nothing",
        lambda engine: engine.generate(CONTROL, GREEDY, priority=[1], use_tqdm=False),
        r"priority must be 0 unless the engine's scheduling_policy is 'priority', given 1",
    ),
    (
        "a priority that is no number",
        lambda engine: engine.generate(CONTROL, GREEDY, priority=["first"], use_tqdm=False),  # type: ignore[list-item]
        r"priority must be an integer from -2147483648 to 2147483647, given 'first'",
    ),
    (
        "stream: a list of prompts",
        lambda engine: engine.stream([CONTROL, CONTROL]),  # type: ignore[arg-type]
        r"prompt_token_ids must be integers .* given 'def add",
    ),
    (
        "stream: parameters that are none",
        lambda engine: engine.stream(CONTROL, 5),  # type: ignore[arg-type]
        r"sampling_params must be a SamplingParams, given int",
    ),
    (
        "stream: an id out of the vocabulary",
        lambda engine: engine.stream(CONTROL, SamplingParams(stop_token_ids=[5000])),  # type: ignore[arg-type]
        r"stop_token_ids must be integers from 0 to 4095, given 5000",
    ),
    (
        "add_request: an empty id",
        lambda engine: engine.add_request("", CONTROL),
        r"request_id must be a non-empty str .* given ''",
    ),
    (
        "add_request: an id that is a number",
        lambda engine: engine.add_request(5, CONTROL),  # type: ignore[arg-type]
        r"request_id must be .* given 5",
    ),
    (
        "add_request: an id in use",
        lambda engine: [engine.add_request("twice", CONTROL, GREEDY) for _ in range(2)],
        r"request_id must be .* that no unfinished request has, given 'twice'",
    ),
    (
        "add_request: an id that is too long",
        lambda engine: engine.add_request("x" * 10**8, CONTROL),
        r"request_id must be .* of at most 256 characters \(the engine's max_request_id_length\).* given 'xxx",
    ),
    (
        "add_request: more requests than may wait",
        lambda engine: [engine.add_request(f"crowd-{number}", CONTROL, GREEDY) for number in range(51)],
        r"at most 50 requests may be unfinished at once \(the engine's max_queued_requests\), given 1 beside 50",
    ),
    (
        "more prompts than may wait",
        lambda engine: engine.generate([CONTROL] * 51, GREEDY, use_tqdm=False),
        r"at most 50 requests may be unfinished at once .* given 51 beside 0: wait for some",
    ),
    (
        "beam search: more prompts than may wait",
        lambda engine: engine.beam_search([CONTROL] * 51, 2, 4),
        r"at most 50 requests .* given 51 beside 0",
    ),
    (
        "add_request: a priority that is none",
        lambda engine: engine.add_request("x", CONTROL, GREEDY, priority=None),  # type: ignore[arg-type]
        r"priority must be an integer from -2147483648 to 2147483647, given None",
    ),
    (
        "add_request: a priority too large",
        lambda engine: engine.add_request("x", CONTROL, GREEDY, priority=2**31),
        r"priority must be an integer .* given 2147483648",
    ),
    (
        "beam search: too wide",
        lambda engine: engine.beam_search(CONTROL, 11),
        r"beam_width must be an integer from 1 to 10 .*given 11: raise max_logprobs",
    ),
    (
        "beam search: no beam",
        lambda engine: engine.beam_search(CONTROL, 0),
        r"beam_width must be an integer from 1 to 10 .*given 0",
    ),
    (
        "beam search: half a beam",
        lambda engine: engine.beam_search(CONTROL, 1.5),  # type: ignore[arg-type]
        r"beam_width .*given 1.5",
    ),
    (
        "beam search: no token",
        lambda engine: engine.beam_search(CONTROL, 2, 0),
        r"max_tokens must be an integer of at least 1, or None, given 0",
    ),
    (
        "beam search: a penalty that is no number",
        lambda engine: engine.beam_search(CONTROL, 2, 4, math.nan),
        r"length_penalty must be a number from -10 to 10, given nan",
    ),
    (
        "beam search: a prompt that is none",
        lambda engine: engine.beam_search([5, -5], 2, 4),
        r"prompt_token_ids must be integers from 0 to 4095, given -5",
    ),
    (
        "beam search: a prompt too long",
        lambda engine: engine.beam_search([5] * LENGTH, 2, 4),
        r"prompt must be shorter than 128 tokens .* given 128",
    ),
    (
        "report: fewer steps than none",
        lambda engine: engine.reset_report(profile_steps=-1),
        r"profile_steps must be an integer from 0 to 1000, given -1",
    ),
]

# (engine arguments, what the message matches)
ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"model": "/no/such/directory"}, r"/no/such/directory"),
    ({"tokenizer": "/no/such/directory"}, r"/no/such/directory"),
    ({"device": "cuda:77"}, r"device='cuda:77' is not there: torch sees \d+ CUDA devices. Allowed: 'cpu'"),
    ({"device": "cpu:x"}, r"device must be .* given 'cpu:x'"),
    (
        {"max_model_len": 10**6},
        r"max_model_len must be at most the model's max_position_embeddings, \d+, given 1000000",
    ),
    (
        {"token_bucket_sizes": (16,), "max_num_batched_tokens": 64},
        r"the largest of token_bucket_sizes must be at least max_num_batched_tokens, 64, given 16",
    ),
    ({"max_num_seqs": 33}, r"max_num_seqs must be at most the largest of bucket_sizes, 32, given 33"),
    ({"max_num_batched_tokens": 4}, r"max_num_batched_tokens must be at least max_num_seqs, 32 .* given 4"),
    (
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
        r"max_num_batched_tokens must be at least max_model_len, \d+, without chunked prefill .* given 64",
    ),
    ({"num_kv_blocks": 2**47}, r"num_kv_blocks"),
    ({"kv_cache_memory_bytes": 1}, r"kv_cache_memory_bytes"),
    ({"kv_cache_dtype": "int8", "kv_cache_skip_layers": (999,)}, r"kv_cache_skip_layers must .*given"),
    ({"cuda_graphs": "manual"}, r"cuda_graphs must be 'auto', .* enforce_eager=True .* given 'manual'"),
    ({"num_threads": 1024}, r"num_threads must be at most \d+, the cores that this process may use .* given 1024"),
    ({"logits_transforms": ["no_such_module:name"]}, r"logits_transforms: 'no_such_module:name' must be 'module:name'"),
    ({"logits_transforms": ["json:JSONDecoder"]}, r"logits_transforms must hold LogitsTransform objects .* given"),
]


def refuse_prompt(prompt: Any) -> Use:
    """Of a list with good ones, which are served."""

    def use(engine: CompiledEngine) -> RequestOutput:
        before, bad, after = engine.generate([CONTROL, prompt, CONTROL], GREEDY, use_tqdm=False)
        assert before.outputs[0].finish_reason == after.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match=r".") as error:
            engine.add_request("bad", prompt, GREEDY)
        assert str(error.value) == bad.outputs[0].stop_reason, "the same in words, however it comes in"
        return bad

    return use


def refuse_params(arguments: dict[str, Any]) -> Use:
    return lambda engine: engine.generate(CONTROL, SamplingParams(**arguments), use_tqdm=False)


def refuse_chat(arguments: dict[str, Any]) -> Use:
    return lambda engine: engine.chat(**arguments, sampling_params=GREEDY, use_tqdm=False)


def refuse_engine(arguments: dict[str, Any]) -> Use:
    return lambda engine: CompiledEngine(**{**EAGER, **arguments})


CASES: list[tuple[str, Use, str]] = [
    *((f"prompt: {prompt!r:.40}", refuse_prompt(prompt), words) for prompt, words in PROMPTS),
    *((f"params: {arguments!r:.60}", refuse_params(arguments), words) for arguments, words in PARAMS),
    *CALLS,
    *((f"engine: {arguments!r:.60}", refuse_engine(arguments), words) for arguments, words in ENGINES),
    *((f"chat: {arguments!r:.80}", refuse_chat(arguments), words) for arguments, words in CHATS),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    arguments: dict[str, Any] = {
        "bucket_sizes": (1, 4),
        "num_kv_blocks": 40,
        "max_model_len": LENGTH,
        "check_invariants": True,
        "max_queued_requests": 50,
    }
    with CompiledEngine(**EAGER, **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def control(engine: CompiledEngine) -> list[int]:
    """The tokens of the control request before anything bad came."""
    return engine.generate(CONTROL, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def reason_of(use: Use, engine: CompiledEngine) -> str:
    """Why it was refused: by a ``ValueError``, or in the place of an output."""
    try:
        result = use(engine)
    except ValueError as error:
        return str(error)
    outputs = result if isinstance(result, list) else [result]
    assert all(isinstance(output, RequestOutput) for output in outputs), f"it was accepted: {outputs!r:.200}"
    (completion,) = outputs[-1].outputs
    assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], ""), "it was served"
    return str(completion.stop_reason)


@pytest.mark.filterwarnings("ignore::compiled_llm.RequestsFailedWarning")  # refused is what all of a call is here
@pytest.mark.parametrize(("use", "words"), [case[1:] for case in CASES], ids=[ascii(case[0]) for case in CASES])
def test_refused_in_words_and_at_nobody_elses_cost(
    engine: CompiledEngine, control: list[int], use: Use, words: str
) -> None:
    reason = reason_of(use, engine)
    engine.abort(["twice", *(f"crowd-{number}" for number in range(50))])
    assert not engine.has_unfinished_requests()
    assert engine.stats().used_blocks == 0
    (output,) = engine.generate(CONTROL, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == control
    assert engine.stats().used_blocks == 0
    assert re.search(words, reason, re.DOTALL), reason
    assert len(reason) < 2000, "the whole of a long input is no help"


def test_there_are_enough_of_them() -> None:
    kinds = Counter(name.split(":")[0] for name, *_ in CASES)
    assert len(CASES) >= 80
    assert (
        min(kinds[kind] for kind in ("prompt", "params", "chat", "engine", "beam search", "stream", "add_request")) >= 3
    )
