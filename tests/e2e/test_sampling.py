"""Every sampling parameter through the engine, on the demo model: what it changes, and that nothing else changes."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.api.outputs import CompletionOutput, Logprob
from compiled_llm.constraints import grammars as structured_outputs
from compiled_llm.constraints.grammars import GrammarState
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.step.logits_transforms import Field, LogitsContext, LogitsTransform
from tests.drawn import marked
from tests.families import COMPILED_SIZES

PROMPT = "def read(path):\n    with"
LONG = (
    "import os\nimport sys\n\n\nclass Stack:\n    def __init__(self, items=None):\n        self.items = items or []\n"
)
EOS, NUM_TOKENS = 0, 24
Change = Callable[[Tensor, list[int], list[int]], Tensor]  # logits [V], prompt, output -> logits


class Lift(LogitsTransform):
    """Adds a number to the logits of all odd ids."""

    name = "lift"
    fields: Mapping[str, Field] = {"strength": Field((), torch.float32, 0.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        if not isinstance(argument, float | int):
            raise ValueError(f"lift must be a number, given {argument!r}")
        return {"strength": argument}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        odd = torch.arange(logits.shape[1], device=logits.device) % 2
        return logits + fields["strength"][:, None] * odd


class Once(LogitsTransform):
    """Takes a number from logits of tokens that the output has, another from the prompt's, times position modulo 3."""

    name = "once"
    fields: Mapping[str, Field] = {"penalties": Field((2,), torch.float32, 0.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return {"penalties": [float(item) for item in argument]}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        counts = context.token_counts
        of_output, of_prompt = fields["penalties"].unbind(1)
        penalty = (counts >= 1) * of_output[:, None] + (counts % 1 != 0) * of_prompt[:, None]
        return logits - penalty * (context.position % 3)[:, None]


ARGUMENTS: dict[str, Any] = {"dtype": "float32", "check_invariants": True, "logits_transforms": (Lift, Once)}
EAGER: dict[str, Any] = {"enforce_eager": True, "bucket_sizes": (1, 4), "max_num_batched_tokens": 256, **ARGUMENTS}


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER) as engine:
        yield engine


@pytest.fixture(scope="module")
def chunking() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER | {"max_num_batched_tokens": 16}) as engine:
        yield engine


@pytest.fixture(scope="module")
def without_cache() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _nothing_left_behind(engine: CompiledEngine) -> Iterator[None]:
    yield
    assert not engine.has_unfinished_requests()
    assert engine.stats().used_blocks == 0


def ids_of(engine: CompiledEngine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text)


def served(engine: CompiledEngine, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params
    return engine.generate([prompt], SamplingParams(**params), use_tqdm=False, raise_on_error=True)[0]


def completed(engine: CompiledEngine, prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    return served(engine, prompt, **params).outputs[0]


def tokens(engine: CompiledEngine, prompt: Any = PROMPT, **params: Any) -> list[int]:
    return completed(engine, prompt, **params).token_ids


def generated(model: transformers.PreTrainedModel, prompt: list[int], **arguments: Any) -> list[int]:
    """What transformers' own ``generate`` gives, greedily."""
    arguments = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | arguments
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[0, len(prompt) :].tolist()


def written_out(model: transformers.PreTrainedModel, prompt: list[int], change: Change) -> list[int]:
    """Greedy decoding of changed logits as a plain loop."""
    step, cache, output = torch.tensor([prompt]), None, list[int]()
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            result = model(step, past_key_values=cache, use_cache=True)
            output.append(int(change(result.logits[0, -1].clone(), prompt, output).argmax()))
            cache, step = result.past_key_values, torch.tensor([output[-1:]])
    return output


# -- Each change of logits against transformers


def test_each_change_of_logits_gives_the_tokens_that_transformers_gives(
    engine: CompiledEngine, model: transformers.PreTrainedModel
) -> None:
    assert engine.tokenizer is not None
    spell, vocab = engine.tokenizer.encode_piece, engine.model_config.vocab_size
    changed: set[int] = set()
    prompt, free = ids_of(engine, PROMPT), tokens(engine)
    assert free == generated(model, prompt)
    phrase = engine.tokenizer.decode(free[4:7])
    words = list(dict.fromkeys(tuple(spell(text)) for text in (phrase, " " + phrase.lstrip())))
    assert max(map(len, words)) > 1
    bias = {free[0]: -100.0, free[3]: -2.5, 400: 6.0}
    allowed = sorted({*free[::2], *prompt, 300, 301})
    banned = [token for token in range(vocab) if token not in allowed]
    sequence_bias = [[[token], value] for token, value in bias.items()]
    no_words = [list(word) for word in words]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.4}, {"repetition_penalty": 0.4}),
        ({"logit_bias": bias}, {"sequence_bias": sequence_bias}),
        ({"bad_words": phrase}, {"bad_words_ids": no_words}),
        ({"allowed_token_ids": allowed}, {"suppress_tokens": banned}),
        (
            {"repetition_penalty": 1.2, "logit_bias": bias, "bad_words": phrase, "allowed_token_ids": allowed},
            {
                "repetition_penalty": 1.2,
                "sequence_bias": sequence_bias,
                "bad_words_ids": no_words,
                "suppress_tokens": banned,
            },
        ),
    ]
    for case, (params, arguments) in enumerate(cases):
        found = tokens(engine, **params)
        assert found == generated(model, prompt, **arguments), params
        changed |= {case} if found != free else set()
        assert set(found) <= set(allowed) or "allowed_token_ids" not in params
    assert changed == set(range(6)), "some of it had no effect"


def test_min_tokens_bans_what_ends_the_output(engine: CompiledEngine, model: transformers.PreTrainedModel) -> None:
    prompt, free = ids_of(engine, PROMPT), tokens(engine)
    stop = free[2]
    for min_tokens in (1, 4, 24):
        params = {"min_tokens": min_tokens, "stop_token_ids": [stop], "ignore_eos": False}
        completion = completed(engine, **params)
        expected = generated(model, prompt, min_new_tokens=min_tokens, eos_token_id=[EOS, stop])
        assert completion.token_ids == expected
        assert len(expected) >= min_tokens
        assert not {EOS, stop} & set(expected[:min_tokens])
        assert completion.finish_reason == ("stop" if expected[-1] in (EOS, stop) else "length")
    assert tokens(engine, min_tokens=0, stop_token_ids=[stop]) == free[: free.index(stop) + 1]
    assert tokens(engine, min_tokens=20, stop_token_ids=[stop])[:2] == free[:2]


def test_end_of_text_does_not_come_before_the_minimum(
    engine: CompiledEngine, model: transformers.PreTrainedModel
) -> None:
    lifted = {EOS: 100.0}
    assert tokens(engine, logit_bias=lifted, ignore_eos=False) == [EOS]
    found = tokens(engine, logit_bias=lifted, ignore_eos=False, min_tokens=5)
    assert found == [*tokens(engine)[:5], EOS]
    expected = generated(
        model, ids_of(engine, PROMPT), sequence_bias=[[[EOS], 100.0]], min_new_tokens=5, eos_token_id=[EOS]
    )
    assert found == expected
    assert tokens(engine, logit_bias=lifted, min_tokens=5) == [EOS] * NUM_TOKENS, "ignore_eos: it ends nothing"


def test_stop_strings_wait_for_the_minimum(engine: CompiledEngine) -> None:
    assert engine.tokenizer is not None
    free = completed(engine, max_tokens=48)
    pieces = [engine.tokenizer.decode([token]) for token in free.token_ids]
    stop = next(piece for piece in pieces if piece.strip() and sum(map(piece.__eq__, pieces)) > 1)
    ends = [place + 1 for place in range(48) if stop in "".join(pieces[: place + 1])[-len(stop) :]]  # tokens
    assert len(ends) > 1
    for min_tokens, end in [(0, ends[0]), (ends[0] - 1, ends[0]), (ends[0], ends[1]), (ends[1] - 1, ends[1])]:
        completion = completed(engine, max_tokens=48, stop=stop, min_tokens=min_tokens)
        assert completion.token_ids == free.token_ids[:end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text + stop == free.text[: len(completion.text) + len(stop)]
    assert completed(engine, max_tokens=ends[0], stop=stop, min_tokens=ends[0]).finish_reason == "length"


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, -1.0), (-2.0, 0.5)])
def test_presence_and_frequency_penalties_against_a_plain_loop(
    engine: CompiledEngine, model: transformers.PreTrainedModel, presence: float, frequency: float
) -> None:
    def penalised(logits: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        return logits

    found = tokens(engine, presence_penalty=presence, frequency_penalty=frequency)
    assert found == written_out(model, ids_of(engine, PROMPT), penalised)
    assert found != tokens(engine)


# -- Transforms of one's own


def lifted(strength: float) -> Change:
    return lambda logits, prompt, output: logits + strength * (torch.arange(len(logits)) % 2)


def once(of_output: float, of_prompt: float) -> Change:
    def change(logits: Tensor, prompt: list[int], output: list[int]) -> Tensor:
        times = (len(prompt) + len(output)) % 3
        for tokens_, penalty in ((output, of_output), (prompt, of_prompt)):
            for token in set(tokens_):
                logits[token] -= penalty * times
        return logits

    return change


def test_transforms_change_what_they_should_and_nobody_else(
    engine: CompiledEngine, model: transformers.PreTrainedModel
) -> None:
    prompt = ids_of(engine, PROMPT)
    asks: list[tuple[dict[str, Any], Change]] = [
        ({}, lambda logits, prompt, output: logits),
        ({"lift": 5}, lifted(5)),
        ({"lift": -4.5}, lifted(-4.5)),
        ({"once": [2, 0]}, once(2, 0)),
        ({"once": (1.5, -1)}, once(1.5, -1)),
        ({"once": [1, 1], "lift": 3}, lambda logits, *ids: once(1, 1)(lifted(3)(logits, *ids), *ids)),
    ]
    expected = [written_out(model, prompt, change) for _, change in asks]
    assert len({tuple(row) for row in expected}) == len(asks)
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logits_transforms=ask) for ask, _ in asks
    ]
    outputs = engine.generate([PROMPT] * len(asks), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert tokens(engine) == expected[0]
    for ask, row in zip(asks, expected, strict=True):
        assert tokens(engine, logits_transforms=ask[0]) == row


def test_a_bad_argument_of_a_transform_costs_its_request_alone(engine: CompiledEngine) -> None:
    greedy = {"temperature": 0, "max_tokens": 4}
    asks: list[dict[str, Any] | None] = [None, {"lift": "x"}, {"nobody": 1}, {"once": [1, 2, 3]}, {"once": 5}]
    params = [SamplingParams(**greedy, logits_transforms=ask) for ask in asks]
    outputs = engine.generate([PROMPT] * len(asks), params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", *["error"] * 4]
    assert "lift must be a number, given 'x'" in str(outputs[1].outputs[0].stop_reason)
    assert "'nobody'" in str(outputs[2].outputs[0].stop_reason)


# -- Everything at once

EVERY_KIND: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "top_n_sigma": 2.5, "seed": 2, "logprobs": 3},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 1.2, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {400: 5.0, 8: -10.0}, "prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 4, "bad_words": ["return", "self.items"], "min_tokens": 9, "ignore_eos": False},
    {"temperature": 1.0, "seed": 5, "allowed_token_ids": list(range(300, 900)), "logprobs": -1},
    {"temperature": 1.0, "seed": 6, "structured_outputs": {"regex": "(add|sub) [0-9]{8,40}"}, "ignore_eos": False},
    {"structured_outputs": {"choice": ["one and only one", "two"]}, "ignore_eos": False, "logprobs": 1},
    {"temperature": 0.9, "seed": 7, "logits_transforms": {"lift": 2.0}},
    {"logits_transforms": {"once": [1.0, 0.5]}, "prompt_logprobs": 0},
    {"temperature": 1.1, "seed": 8, "n": 3, "repetition_penalty": 1.1, "logprobs": 2},
]


def requests(engine: CompiledEngine) -> tuple[list[list[int]], list[SamplingParams]]:
    """A prompt of a length of its own for each kind of request."""
    ids, defaults = ids_of(engine, LONG), {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    return [ids[: 12 + 2 * n] for n in range(len(EVERY_KIND))], [
        SamplingParams(**defaults | kind) for kind in EVERY_KIND
    ]


@pytest.fixture(scope="module")
def alone(engine: CompiledEngine) -> list[RequestOutput]:
    """Each of ``requests`` by itself, nothing cached."""
    outputs = []
    for prompt, params in zip(*requests(engine), strict=True):
        engine.reset_prefix_cache()
        outputs += engine.generate([prompt], params, use_tqdm=False, raise_on_error=True)
    return outputs


def check_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """The same tokens, text and ends; log-probabilities of the same tokens within 1e-4."""
    assert len(found) == len(expected)
    for output, wanted in zip(found, expected, strict=True):
        assert len(output.outputs) == len(wanted.outputs)
        check_close(output.prompt_logprobs, wanted.prompt_logprobs)
        for completion, other in zip(output.outputs, wanted.outputs, strict=True):
            rest = {"logprobs": None, "cumulative_logprob": None}
            assert dataclasses.replace(completion, **rest) == dataclasses.replace(other, **rest)
            check_close(completion.logprobs, other.logprobs)
            assert completion.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def check_close(
    found: Sequence[dict[int, Logprob] | None] | None, expected: Sequence[dict[int, Logprob] | None] | None
) -> None:
    assert (found is None) == (expected is None)
    for row, wanted in zip(found or (), expected or (), strict=True):
        assert list(row or ()) == list(wanted or ())
        for one, other in zip((row or {}).values(), (wanted or {}).values(), strict=True):
            assert (one.rank, one.decoded_token) == (other.rank, other.decoded_token)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_requests_of_every_kind_in_one_batch_get_what_each_gets_alone(
    engine: CompiledEngine, alone: list[RequestOutput]
) -> None:
    prompts, params = requests(engine)
    check_same(engine.generate(prompts, params, use_tqdm=False), alone)
    assert engine.stats().num_running == 0
    order = torch.randperm(len(prompts)).tolist()
    shuffled = engine.generate([prompts[n] for n in order], [params[n] for n in order], use_tqdm=False)
    check_same(shuffled, [alone[n] for n in order])
    assert any(output.num_cached_tokens for output in shuffled)
    texts = [completion.text for output in alone for completion in output.outputs]
    assert len(set(texts)) == len(texts)
    regex, choice = alone[8].outputs[0], alone[9].outputs[0]
    assert regex.text[:4] in ("add ", "sub ")
    assert set(regex.text[4:]) <= set("0123456789")
    assert (choice.text, choice.finish_reason) in {("one and only one", "stop"), ("two", "stop")}


SMALL_POOL = {"num_kv_blocks": 8, "enable_prefix_caching": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "recomputed": {**SMALL_POOL, "preemption_mode": "recompute"},
    "swapped": {**SMALL_POOL, "preemption_mode": "swap", "swap_space_bytes": 2**24},
    "recomputed in chunks, cached": {"num_kv_blocks": 9, "max_num_batched_tokens": 16},
    "steps ahead": {**SMALL_POOL, "async_scheduling": True, "max_num_batched_tokens": 32},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 110},
}


@pytest.mark.parametrize("name", marked(SETTINGS, ("steps ahead",)))
def test_chunks_and_preemptions_change_nothing(alone: list[RequestOutput], name: str) -> None:
    with CompiledEngine(**EAGER | SETTINGS[name], max_model_len=64) as engine:
        prompts, params = requests(engine)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        check_same(outputs, alone)
        stats = engine.stats()
        assert (stats.num_preemptions > 0) == (name != "chunks of 16")
        assert (stats.num_swap_preemptions > 0) == (name == "swapped")
        assert stats.used_blocks == 0
        assert sum(output.metrics.num_preemptions for output in outputs) == stats.num_preemptions
        for output, kind in zip(outputs, EVERY_KIND, strict=True):
            assert 0 <= output.num_cached_tokens < len(output.prompt_token_ids)
            assert output.num_cached_tokens == 0 or "prompt_logprobs" not in kind
        preempted = [kind for output, kind in zip(outputs, EVERY_KIND, strict=True) if output.metrics.num_preemptions]
        assert name == "chunks of 16" or any("penalty" in key for kind in preempted for key in kind)


# -- Log-probabilities


def check_logprobs(
    rows: Sequence[dict[int, Logprob]], ids: Sequence[int], logprobs: Tensor, count: int, tolerance: float = 1e-4
) -> None:
    """Rows as the user reads them against log-probabilities ``[len(ids), V]`` in float64."""
    for row, token, expected in zip(rows, ids, logprobs, strict=True):
        own = row[token]
        assert next(iter(row)) == token
        assert own.logprob == pytest.approx(float(expected[token]), abs=tolerance)
        more = [int((expected > expected[token] + error).sum()) for error in (tolerance, -tolerance)]
        assert more[0] < own.rank <= more[1]
        top = sorted(row.values(), key=lambda found: found.rank)[:count]
        assert [found.rank for found in top] == list(range(1, count + 1))
        assert len(row) == count + (own.rank > count)
        assert [found.logprob for found in top] == pytest.approx(expected.topk(count).values.tolist(), abs=tolerance)
        for token_id, found in row.items():
            assert found.logprob == pytest.approx(float(expected[token_id]), abs=tolerance)


def logprobs_of(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    """Of the tokens that follow each of ``ids``: ``[len(ids), V]`` float64."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


CHANGED = {"temperature": 1.3, "seed": 5, "repetition_penalty": 1.5, "top_k": 50}


@pytest.mark.parametrize(("asks", "chunks"), [({}, True), (CHANGED, False)], ids=["chunks", "changed"])
def test_logprobs_are_those_of_transformers(
    engine: CompiledEngine,
    chunking: CompiledEngine,
    model: transformers.PreTrainedModel,
    asks: dict[str, Any],
    chunks: bool,
) -> None:
    """Of the model's own logits, whatever changes them; the second time, too, when the prompt is cached."""
    chunked = chunking if chunks else engine
    chunked.reset_prefix_cache()
    prompt = ids_of(engine, LONG)
    plain = tokens(chunked, prompt, **asks)
    for count in (5, 0):
        for wants in ({"logprobs": count, "prompt_logprobs": count}, {"logprobs": count}):
            output = served(chunked, prompt, **wants, **asks)
            (completion,) = output.outputs
            assert completion.token_ids == plain
            assert output.num_cached_tokens == (0 if "prompt_logprobs" in wants else (len(prompt) - 1) // 16 * 16)
            expected = logprobs_of(model, prompt + plain)
            assert completion.logprobs is not None
            check_logprobs(completion.logprobs, plain, expected[len(prompt) - 1 : -1], count)
            own = [row[token].logprob for row, token in zip(completion.logprobs, plain, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(math.fsum(own), abs=1e-5)
            if "prompt_logprobs" in wants:
                assert output.prompt_logprobs is not None
                assert output.prompt_logprobs[0] is None
                rows = [row for row in output.prompt_logprobs[1:] if row is not None]
                check_logprobs(rows, prompt[1:], expected[: len(prompt) - 1], count)
            else:
                assert output.prompt_logprobs is None
    output = served(chunked, prompt, logprobs=-1, prompt_logprobs=-1, **asks)
    assert all(len(row) in (20, 21) for row in output.outputs[0].logprobs or [{}])
    assert all(len(row or {}) in (20, 21) for row in (output.prompt_logprobs or [{}])[1:])


def test_logprobs_name_their_tokens_and_are_there_only_for_those_who_ask(engine: CompiledEngine) -> None:
    assert engine.tokenizer is not None
    both = engine.generate(
        [PROMPT] * 2, [SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0)], use_tqdm=False
    )
    asked, not_asked = (output.outputs[0] for output in both)
    assert asked.token_ids == not_asked.token_ids
    assert (not_asked.logprobs, not_asked.cumulative_logprob, both[1].prompt_logprobs) == (None, None, None)
    for row in asked.logprobs or [{}]:
        assert [found.decoded_token for found in row.values()] == [engine.tokenizer.decode([token]) for token in row]
    single = served(engine, [5], prompt_logprobs=3, max_tokens=2)
    assert single.prompt_logprobs == [None]
    pieces = [output.outputs[0] for output in engine.stream(PROMPT, SamplingParams(temperature=0, logprobs=0))]
    assert [len(piece.logprobs or ()) for piece in pieces] == list(range(1, len(pieces) + 1))


# -- Several completions


def together(engine: CompiledEngine, prompt: list[int], **params: Any) -> tuple[RequestOutput, int]:
    """The output, and the most blocks that were in use after a step."""
    engine.add_request("me", prompt, SamplingParams(**{"ignore_eos": True, "seed": 11} | params))
    used, last = 0, None
    while engine.has_unfinished_requests():
        for last in engine.step():
            assert last.request_id == "me"
        used = max(used, engine.stats().used_blocks)
    assert last is not None
    assert last.finished
    return last, used


@pytest.mark.parametrize(
    ("caching", "length", "max_tokens", "most_used"),
    [
        (True, 40, 8, 2 + 3),  # two full blocks in common, and the one that was half full for each
        (True, 48, 8, 3 + 3),  # all full: the last token is computed anew
        (False, 48, 8, 2 + 3 + 3),  # in a copy unless its block is cached
        (True, 47, 1, 3),  # the first has ended when the others begin
        (False, 5, 12, 3),
    ],
)
def test_completions_share_the_blocks_of_their_prompt(
    engine: CompiledEngine, without_cache: CompiledEngine, caching: bool, length: int, max_tokens: int, most_used: int
) -> None:
    prompt = ids_of(engine, LONG * 2)[:length]
    assert len(prompt) == length
    served_by = engine if caching else without_cache
    first, _ = together(served_by, prompt, max_tokens=max_tokens)
    served_by.reset_prefix_cache()
    before = served_by.stats()
    output, used = together(served_by, prompt, max_tokens=max_tokens, n=3)
    stats = served_by.stats().since(before)
    assert used == most_used
    # The prompt once; the last token of it, whose logits they need, once for each of the others.
    assert stats.num_computed_tokens == length + 2 + 3 * (max_tokens - 1)
    assert (stats.num_requests, stats.num_finished, stats.num_output_tokens) == (1, 1, 3 * max_tokens)
    assert stats.num_prompt_tokens == length
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.outputs[0] == first.outputs[0]
    assert max_tokens == 1 or len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert all(len(completion.token_ids) == max_tokens for completion in output.outputs)


def test_each_completion_follows_from_the_seed_and_its_index(engine: CompiledEngine) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "logprobs": 1, "prompt_logprobs": 1}
    five = served(engine, n=5, **sampled)
    two = served(engine, n=2, **sampled)
    assert [c.token_ids for c in two.outputs] == [c.token_ids for c in five.outputs[:2]]
    assert five.outputs[0].token_ids == tokens(engine, **sampled)
    assert len({tuple(completion.token_ids) for completion in five.outputs}) == 5
    assert len(five.prompt_logprobs or ()) == len(five.prompt_token_ids)
    unseeded = [served(engine, temperature=1.0, n=2) for _ in range(2)]
    assert len({tuple(completion.token_ids) for output in unseeded for completion in output.outputs}) == 4


def test_completions_end_each_for_its_own_reason(engine: CompiledEngine) -> None:
    free = served(engine, temperature=1.0, seed=3, n=4)
    stop = free.outputs[2].token_ids[5]
    output = served(engine, temperature=1.0, seed=3, n=4, stop_token_ids=[stop])
    for completion, other in zip(output.outputs, free.outputs, strict=True):
        ids = other.token_ids
        ended = stop in ids
        assert completion.token_ids == (ids[: ids.index(stop) + 1] if ended else ids)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.stop_reason == (stop if ended else None)
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    assert output.metrics.finished_time is not None


def test_several_completions_in_a_stream(engine: CompiledEngine) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    outputs = list(engine.stream(PROMPT, params))
    assert all([completion.index for completion in output.outputs] == [0, 1, 2] for output in outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(3):
        lengths = [len(output.outputs[index].token_ids) for output in outputs]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 10
    (whole,) = engine.generate([PROMPT], params, use_tqdm=False)
    assert outputs[-1].outputs == whole.outputs
    next(iter(engine.stream(PROMPT, params)))  # and dropped: nothing of it stays, see _nothing_left_behind


@pytest.mark.parametrize("num_steps", [0, 2, 4, 6])
def test_a_request_of_several_completions_is_aborted_as_a_whole(chunking: CompiledEngine, num_steps: int) -> None:
    """While it waits, amid its prompt, when the others are about to begin, and later."""
    chunking.reset_prefix_cache()
    before, alone = chunking.stats(), tokens(chunking)
    chunking.add_request("other", PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    chunking.add_request("me", list(range(5, 55)), SamplingParams(n=3, max_tokens=30, ignore_eos=True))
    outputs = [output for _ in range(num_steps) for output in chunking.step()]
    assert any(output.request_id == "me" for output in outputs) == (num_steps > 3)
    chunking.abort("me")
    assert chunking.stats().num_running + chunking.stats().num_waiting == 1
    while chunking.has_unfinished_requests():
        outputs = chunking.step()
        assert {output.request_id for output in outputs} <= {"other"}
    assert outputs[-1].outputs[0].token_ids == alone
    assert chunking.stats().used_blocks == 0
    stats = chunking.stats().since(before)
    assert (stats.num_requests, stats.num_finished) == (3, 3)


# -- What cannot go on


def test_a_request_that_is_left_no_token_ends_with_the_reason(engine: CompiledEngine) -> None:
    assert engine.tokenizer is not None
    (token,) = engine.tokenizer.encode_piece("self")
    for n in (1, 2):
        params = {"temperature": float(n - 1), "n": n, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
        stuck = SamplingParams(**params, allowed_token_ids=(token,), bad_words="selfself")
        outputs = engine.generate([PROMPT] * 2, [stuck, SamplingParams(**params | {"seed": 1})], use_tqdm=False)
        for completion in outputs[0].outputs:
            assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [token], "self")
            assert "leave no token to go on with" in str(completion.stop_reason)
            assert [next(iter(row)) for row in completion.logprobs or ()] == [token]
            own = (completion.logprobs or [{}])[0][token].logprob
            assert completion.cumulative_logprob == pytest.approx(own)
        assert all(len(completion.token_ids) == 8 for completion in outputs[1].outputs)


@pytest.mark.parametrize("method", ["allow", "accept"])
def test_a_grammar_that_fails_costs_its_request_alone(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    working = getattr(GrammarState, method)

    def failing(self: GrammarState, argument: Any) -> None:
        if len(self._token_ids) == 2:
            raise ValueError("the library's limits are reached")
        working(self, argument)

    monkeypatch.setattr(GrammarState, method, failing)
    greedy = {"temperature": 0, "max_tokens": 6}
    asks = [{}, {"structured_outputs": {"regex": "[a-z ]{30}"}, "logprobs": 0}, {"logprobs": 0}]
    params = [SamplingParams(**greedy, **ask) for ask in asks]
    outputs = engine.generate([PROMPT] * 3, params, use_tqdm=False)
    first, failed, last = (output.outputs[0] for output in outputs)
    assert failed.finish_reason == "error"
    assert "the library's limits are reached" in str(failed.stop_reason)
    assert len(failed.logprobs or ()) == len(failed.token_ids) >= 2
    assert first.token_ids == last.token_ids == tokens(engine)[:6]


def test_a_grammar_whose_tokens_take_too_long_ends_its_request_alone(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tokens takes longer than the one before it."""
    monkeypatch.setattr(structured_outputs, "_SECONDS_AT_ONCE", 0.05)
    monkeypatch.setattr(structured_outputs, "_SECONDS_A_TOKEN", 0.0)
    ambiguous = {"grammar": 'start: s\ns: s s | "a" | "b" | s s s'}
    greedy = {"temperature": 0, "max_tokens": 6}
    asks = [greedy, greedy | {"structured_outputs": ambiguous, "max_tokens": None}, greedy]
    outputs = engine.generate([PROMPT] * 3, [SamplingParams(**ask) for ask in asks], use_tqdm=False)
    first, ended, last = (output.outputs[0] for output in outputs)
    assert ended.finish_reason == "error"
    assert "too much processor time for its tokens" in str(ended.stop_reason)
    assert set(ended.text) <= {"a", "b"}
    assert first.token_ids == last.token_ids == tokens(engine)[:6]


# -- Compiled


def test_compiled_all_of_it_is_the_same_without_a_recompile() -> None:
    arguments = {**ARGUMENTS, **COMPILED_SIZES, "dtype": "bfloat16"}
    with CompiledEngine(**arguments, enforce_eager=True, max_num_batched_tokens=256) as engine:
        prompts, params = requests(engine)
        expected = engine.generate(prompts, params, use_tqdm=False)
    with CompiledEngine(**arguments) as engine:
        check_same(engine.generate(prompts, params, use_tqdm=False), expected)
        report = engine.compile_report()
        assert (report.graph_breaks, report.recompiles) == (0, 0)
        names = {graph.name for graph in report.reports}
        assert names == {"step", "sample", "sample_changed", "logprobs", "prompt_logprobs"}
        assert all(graph.graphs == 1 for graph in report.reports)
