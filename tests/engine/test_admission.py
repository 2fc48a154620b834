"""The door: what a request becomes, and what is refused for the model, the tokenizer or the engine's limits."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.admission import Admission
from compiled_llm.engine.completions import UserRequest
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.models.config_file import read_config
from compiled_llm.step.logits_transforms import Field, LogitsContext, LogitsTransform
from compiled_llm.text.prompts import EncodedPrompt, Prompt
from compiled_llm.text.tokenizer import Tokenizer
from tests.fake_engine import LIMITS

MODEL = read_config(DEMO_MODEL)
VOCAB, EOS = MODEL.vocab_size, MODEL.eos_token_ids[0]
CAPACITY = 100


class Steer(LogitsTransform):
    """Wants a number from 0 to 1 as its argument."""

    name = "steer"
    fields: Mapping[str, Field] = {"strength": Field((), torch.float32, 0.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        if not isinstance(argument, float) or not 0 <= argument <= 1:
            raise ValueError(f"steer must be a float from 0 to 1, given {argument!r}")
        return {"strength": argument}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        return logits + fields["strength"][:, None]


class Window(LogitsTransform):
    """Takes its argument as it comes: three numbers, if all is well."""

    name = "window"
    fields: Mapping[str, Field] = {"window": Field((3,), torch.float32, 0.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return argument if isinstance(argument, dict) else {"window": [float(item) for item in argument]}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        return logits + fields["window"].sum(1, keepdim=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def admission(tokenizer: Tokenizer) -> Admission:
    return make_admission(tokenizer)


def make_admission(tokenizer: Tokenizer | None, max_model_len: int = CAPACITY, **arguments: Any) -> Admission:
    config = EngineConfig(max_logprobs=7, **arguments)
    limits = dataclasses.replace(LIMITS, max_model_len=max_model_len)
    return Admission(config, MODEL, tokenizer, [Steer(), Window()], limits, CAPACITY)


def make(admission: Admission, prompt: Prompt = (5, 6, 7), order: int = 0, **params: Any) -> UserRequest:
    return admission.admit("me", admission.prepare(prompt, SamplingParams(**params)), 0, order)


# -- What a request becomes


def test_a_plain_request(admission: Admission, tokenizer: Tokenizer) -> None:
    entry = make(admission, "def f():", max_tokens=9, seed=4)
    ids = tokenizer.encode("def f():")
    assert (entry.request_id, entry.prompt, entry.prompt_token_ids) == ("me", "def f():", ids)
    (completion,) = entry.completions
    request = completion.request
    assert (str(request.request_id), request.prompt_token_ids, request.seed) == ("me", ids, 4)
    assert request.max_num_tokens == len(ids) + 9
    assert request.stop_token_ids == {EOS}
    assert (request.most_cached_tokens, request.waits_for_tokens, request.keeps_blocks) == (None, False, False)
    assert completion.mask is None
    assert completion.text is not None
    assert completion.logprobs is None
    assert entry.prompt_logprobs is None


def test_what_stops_it_and_how_long_it_may_be(admission: Admission) -> None:
    for params, stops in [
        ({"stop_token_ids": [9, 8]}, {EOS, 8, 9}),
        ({"stop_token_ids": [9], "ignore_eos": True}, {9}),
        ({"ignore_eos": True}, set()),
    ]:
        assert make(admission, **params).completions[0].request.stop_token_ids == stops
    for max_tokens, end in [(None, CAPACITY), (5, 8), (97, CAPACITY), (98, CAPACITY), (10**6, CAPACITY)]:
        assert make(admission, max_tokens=max_tokens).completions[0].request.max_num_tokens == end


def test_several_completions_have_names_and_seeds_of_their_own(admission: Admission) -> None:
    entry = make(admission, n=5, seed=3, bad_words="return x")
    requests = entry.requests
    assert [request.request_id for request in requests] == [("me", index) for index in range(5)]
    assert requests[0].seed == 3
    assert len({request.seed for request in requests}) == 5
    assert all(-(2**63) <= request.seed < 2**63 for request in requests)
    assert [request.seed for request in make(admission, n=7, seed=3).requests[:5]] == [r.seed for r in requests]
    assert [request.keeps_blocks for request in requests] == [True, False, False, False, False]
    assert len({id(completion.mask) for completion in entry.completions}) == 5
    assert all(request.mask is not None and request.waits_for_tokens for request in requests)
    assert not make(admission, min_tokens=2).completions[0].request.waits_for_tokens, "the number of tokens is enough"
    assert len({id(completion.text) for completion in entry.completions}) == 5


def test_a_request_without_a_seed_gets_one_of_the_engines_and_its_order(tokenizer: Tokenizer) -> None:
    def seed(order: int, engine_seed: int) -> int:
        return make(make_admission(tokenizer, seed=engine_seed), order=order).completions[0].request.seed

    seeds = [seed(order, engine_seed) for order in range(3) for engine_seed in range(3)]
    assert len(set(seeds)) == 9
    assert seeds == [seed(order, engine_seed) for order in range(3) for engine_seed in range(3)]


def test_log_probabilities(admission: Admission) -> None:
    entry = make(admission, logprobs=0, prompt_logprobs=7)
    assert (entry.completions[0].logprobs, entry.prompt_logprobs) == ([], [None])
    assert entry.completions[0].request.most_cached_tokens == 0, "cached blocks have no log-probabilities"
    assert make(admission, logprobs=7).completions[0].request.most_cached_tokens is None
    make(admission, logprobs=-1, prompt_logprobs=-1)


def test_detokenize_false_decodes_nothing(admission: Admission) -> None:
    assert make(admission, detokenize=False).completions[0].text is None


def test_what_is_prepared_serves_one_request_and_leaves_nothing_long_to_do(
    admission: Admission, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=2, bad_words=["prepared"], max_tokens=3, seed=1)
    prepared = admission.prepare({"prompt": "def f():", "cache_salt": "s"}, params)
    assert prepared.prompt == ("def f():", tokenizer.encode("def f():"), "s")
    with_grammar = admission.prepare([5], SamplingParams(structured_outputs={"regex": "prepared[0-9]"}))
    with monkeypatch.context() as patch:
        for name in ("encode", "encode_pieces", "decode"):
            patch.setattr(tokenizer, name, None)
        patch.setattr(admission, "_masks", None)
        entry = admission.admit("me", admission.prepare(prepared, params), 0, 0)
        assert admission.admit("you", with_grammar, 0, 0).completions[0].mask is not None
    assert (entry.prompt, entry.prompt_token_ids) == ("def f():", prepared.prompt.token_ids)
    assert entry.completions[1].request.cache_salt == "s"
    with pytest.raises(ValueError, match="serves once"):
        admission.prepare(prepared, None)
    with pytest.raises(ValueError, match="sampling_params"):
        admission.prepare(admission.prepare([5], params), SamplingParams())


# -- What is refused


class Endless(Sequence[int]):
    """Token ids, so many that to look at each would take for ever."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_read = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return 5


@pytest.mark.parametrize(
    "form", [lambda ids: ids, lambda ids: {"prompt_token_ids": ids}, lambda ids: EncodedPrompt("x", ids)]
)
def test_the_length_of_a_prompt_is_checked_before_its_ids(admission: Admission, form: Any) -> None:
    ids = Endless(10**9)
    with pytest.raises(ValueError, match=r"prompt must be shorter than 100 tokens .* given 1000000000"):
        make(admission, form(ids))
    assert ids.num_read == 0
    ids = Endless(7)  # it has more than it says
    assert make(admission, form(ids)).prompt_token_ids == [5] * 7


def test_a_prompt_is_encoded_no_further_than_it_takes_to_refuse_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dataclasses.replace(LIMITS, max_model_len=1000)
    admission = Admission(EngineConfig(), MODEL, tokenizer, [], limits, 1000)
    lengths: list[int] = []
    encode = tokenizer.encode_pieces

    def counting(texts: list[str], split: bool) -> list[list[int]]:
        lengths.append(sum(map(len, texts)))
        return encode(texts, split)

    monkeypatch.setattr(tokenizer, "encode_pieces", counting)
    with pytest.raises(ValueError, match=r"shorter than 1000 tokens .*given \d{4} in its first 8000 characters alone"):
        make(admission, "a b c d " * 30_000)
    assert lengths == [8000]
    spaces = " " * 15_000  # tokens of 16 characters
    assert make(admission, spaces).prompt_token_ids == tokenizer.encode(spaces)
    with pytest.raises(ValueError, match=r"shorter than 1000 tokens .*given 1125$"):
        make(admission, " " * 18_000)


def test_what_the_tokenizers_library_panics_at_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As that of pyo3, which cannot be imported."""

    class Panicking:
        def __getattr__(self, name: str) -> Any:
            def panic(*args: Any, **kwargs: Any) -> Any:
                raise PanicException("retry-limit-in-match over")

            return panic

    admission = make_admission(tokenizer)
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    monkeypatch.setattr(tokenizer, "_plain_backend", Panicking())
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: PanicException: retry-limit"):
        make(admission, "x")
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text"):
        make(admission, bad_words="x")
    with pytest.raises(ValueError, match="the tokenizer cannot decode these tokens"):
        tokenizer.decode([5])
    with pytest.raises(ValueError, match="the tokenizer cannot write its vocabulary"):
        make(admission, structured_outputs={"regex": "x"})
    monkeypatch.setattr(tokenizer, "_backend", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        make(admission, "x")


class Interrupting:
    def encode(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def test_what_needs_a_tokenizer_is_refused_without_one() -> None:
    admission = make_admission(None)
    for params in ({"stop": "x"}, {"bad_words": "x"}, {"structured_outputs": {"regex": "x"}}):
        (name,) = params
        with pytest.raises(ValueError, match=f"{name} needs a tokenizer, and the model has none: use "):
            make(admission, **params)
    entry = make(admission, min_tokens=1, allowed_token_ids=[5, EOS], stop_token_ids=[6], logit_bias={5: 1.0})
    assert entry.completions[0].text is None
    assert entry.completions[0].mask is not None


def test_prompts_that_cannot_fit_are_refused_with_the_limit(admission: Admission, tokenizer: Tokenizer) -> None:
    make(admission, [5] * (CAPACITY - 1))
    small_pool = make_admission(tokenizer, max_model_len=200)
    with pytest.raises(ValueError, match=r"shorter than 100 tokens \(the size of the KV pool; .*given 150"):
        make(small_pool, [5] * 150)
    with pytest.raises(ValueError, match="prompt_token_ids must be integers"):
        make(admission, [5, VOCAB])


def test_transforms_are_looked_up_and_their_arguments_checked(admission: Admission) -> None:
    entry = make(admission, logits_transforms={"steer": 0.5, "window": [1, 2, 3]})
    assert entry.params.logits_transforms == {"steer": 0.5, "window": [1, 2, 3]}
    with pytest.raises(ValueError, match=r"must name some of the engine's, \['steer', 'window'\], given 'other'"):
        make(admission, logits_transforms={"steer": 0.5, "other": 1})
    with pytest.raises(ValueError, match="steer must be a float from 0 to 1, given 2"):
        make(admission, logits_transforms={"steer": 2})


@pytest.mark.parametrize("argument", [[1, 2], [1, 2, 3, 4], [], None, 5, ["x", 1, 2], {"other": 1.0}])
def test_an_argument_that_does_not_fill_the_fields_is_refused_at_the_door(admission: Admission, argument: Any) -> None:
    """Later it would cost everybody of the step."""
    with pytest.raises(ValueError, match="window"):
        make(admission, logits_transforms={"window": argument})
