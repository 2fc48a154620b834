"""Beam search through the engine: the beams of transformers, however many fit, wait, are preempted or served beside."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from tests.drawn import marked
from tests.e2e.test_failures import STAGES, Fault, break_once
from tests.families import checkpoint

EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "check_invariants": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    "def add(a, b):\n    return",
    "class Stack:\n    def",
    "x = [",
    "import os\nimport sys\n\n\ndef main(arguments):\n    path = os.path.join(arguments[0], 'a')\n    if not os.path",
]
# (beam_width, max_tokens, length_penalty)
SEARCHES = [(1, 6, 1.0), (2, 9, -1.0), (3, 1, 0.5), (5, 10, 2.0), (9, 6, 0.0), (10, 8, 0.7)]
NO_EOS: tuple[int, ...] = ()


@functools.cache
def reference() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@functools.cache
def token_ids(prompt: str) -> tuple[int, ...]:
    return tuple(transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)(prompt).input_ids)


@functools.cache
def expected(
    prompt: tuple[int, ...], width: int, max_tokens: int, penalty: float, eos: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """transformers' beams behind a prompt, with their scores."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = reference().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    beams = []
    for sequence in found.sequences[:, len(prompt) :].tolist():
        end = next((place + 1 for place, token_id in enumerate(sequence) if token_id in eos), max_tokens)
        beams.append(sequence[:end])
    scores = [float("nan")] if width == 1 else found.sequences_scores.tolist()  # greedy has none
    return list(zip(beams, scores, strict=True))


def check(
    output: RequestOutput, width: int, max_tokens: int, penalty: float, eos: tuple[int, ...], prompt: Any = None
) -> None:
    prompt = tuple(output.prompt_token_ids) if prompt is None else prompt
    beams = expected(prompt, width, max_tokens, penalty, eos)
    assert output.finished
    assert [out.token_ids for out in output.outputs] == [tokens for tokens, _ in beams]
    for index, (out, (tokens, score)) in enumerate(zip(output.outputs, beams, strict=True)):
        assert out.index == index
        assert out.finish_reason == ("stop" if tokens[-1] in eos else "length")
        assert out.cumulative_logprob is not None
        if width > 1:
            assert out.cumulative_logprob / len(tokens) ** penalty == pytest.approx(score, rel=1e-5, abs=1e-5)


class Watched:
    """What an engine has to take back and to preempt while it searches."""

    def __init__(self, engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_taken_back = self.num_copies = 0
        forks, launch = engine.scheduler.forks, engine.runner.launch
        take_back_one = forks.take_back_one

        def counting_take_back(*args: Any, **kwargs: Any) -> Any:
            taken = take_back_one(*args, **kwargs)
            self.num_taken_back += taken is not None
            return taken

        def counting_launch(output: Any) -> Any:
            self.num_copies += len(output.copies)
            return launch(output)

        monkeypatch.setattr(forks, "take_back_one", counting_take_back)
        monkeypatch.setattr(engine.runner, "launch", counting_launch)


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**EAGER, bucket_sizes=(1, 4, 16), block_size=4, max_model_len=256, num_kv_blocks=400) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_left_behind(engine: CompiledEngine) -> Iterator[None]:
    before = engine.stats()
    yield
    assert not engine.has_unfinished_requests()
    stats = engine.stats().since(before)
    assert (stats.used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_finished == stats.num_requests


ENGINES: dict[str, dict[str, Any]] = {
    "blocks of 4": {"block_size": 4, "bucket_sizes": (1, 16)},
    "no cache, chunks": {"enable_prefix_caching": False, "bucket_sizes": (16,), "token_bucket_sizes": (16,)},
    "more beams than seats": {"block_size": 4, "bucket_sizes": (1, 3), "enable_prefix_caching": False},
    "overlapping": {"block_size": 8, "bucket_sizes": (12,), "async_scheduling": True},
    "a small pool": {"block_size": 4, "bucket_sizes": (16,), "num_kv_blocks": 24, "max_model_len": 80},
    "a small pool without a cache": {
        "block_size": 4, "bucket_sizes": (16,), "num_kv_blocks": 24, "max_model_len": 80,
        "enable_prefix_caching": False,
    },
    "a small pool with swapping": {
        "block_size": 2, "bucket_sizes": (8,), "num_kv_blocks": 45, "max_model_len": 80, "swap_space_bytes": 2**22,
        "preemption_mode": "swap", "async_scheduling": True, "scheduling_policy": "priority",
    },
}  # fmt: skip


ORDINARY = ("more beams than seats", "a small pool with swapping")


@pytest.mark.parametrize("name", marked(ENGINES, ORDINARY))
def test_equal_to_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with CompiledEngine(
        **EAGER, **{"max_model_len": 128, "num_kv_blocks": 300, "token_bucket_sizes": (32,), **ENGINES[name]}
    ) as engine:
        eos = engine.model_config.eos_token_ids
        watched = Watched(engine, monkeypatch)
        for place, (width, max_tokens, penalty) in enumerate(SEARCHES):
            for n in range(4 if "swapping" in name else 0):
                engine.add_request(f"{n}", PROMPTS[n], GREEDY, priority=1)
            prompts = (PROMPTS * 2)[place % 4 :][:2]
            outputs = engine.beam_search(prompts, width, max_tokens, penalty)
            assert [output.prompt for output in outputs] == prompts
            for output in outputs:
                check(output, width, max_tokens, penalty, eos)
            while engine.has_unfinished_requests():
                engine.step()
        stats = engine.stats()
        assert (stats.used_blocks, stats.used_swap_blocks) == (0, 0)
        assert stats.num_finished == stats.num_requests >= len(SEARCHES) * 2
        assert watched.num_copies > 0
        assert (watched.num_taken_back > 0) == ("small pool" in name)
        assert (stats.num_swap_preemptions > 0) == ("swapping" in name)


@pytest.mark.parametrize("num_eos", [pytest.param(1, marks=pytest.mark.battery), 2])
def test_end_of_text_is_reached(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, num_eos: int) -> None:
    """Tokens that the beams are full of are made to end the text."""
    assert engine.tokenizer is not None
    reasons = []
    for width, max_tokens, penalty in ((1, 10, 1.0), (4, 10, 0.0), (5, 10, -1.0)):
        prompts = PROMPTS[width % 3 :][:2]
        plain = [
            token
            for prompt in prompts
            for beam, _ in expected(token_ids(prompt), width, max_tokens, penalty, NO_EOS)
            for token in beam
        ]
        eos = tuple(sorted(set(plain), key=lambda token: (-plain.count(token), token))[:num_eos])
        monkeypatch.setattr(engine, "model_config", dataclasses.replace(engine.model_config, eos_token_ids=eos))
        for output in engine.beam_search(prompts, width, max_tokens, penalty):
            check(output, width, max_tokens, penalty, eos)
            for out in output.outputs:
                hidden = out.finish_reason == "stop"
                whole = engine.tokenizer.decode(output.prompt_token_ids + out.token_ids[: len(out.token_ids) - hidden])
                assert str(output.prompt) + out.text == whole
                reasons.append(out.finish_reason)
        for output in engine.beam_search(prompts, width, max_tokens, penalty, ignore_eos=True):
            check(output, width, max_tokens, penalty, NO_EOS)
    assert set(reasons) == {"stop", "length"}


def test_beams_share_their_blocks(engine: CompiledEngine) -> None:
    prompt, width, max_tokens = (list(token_ids(PROMPTS[3])) * 4)[:100], 10, 16
    engine.reset_prefix_cache()
    engine.scheduler.pool.peak_used = 0
    (output,) = engine.beam_search(prompt, width, max_tokens)
    check(output, width, max_tokens, 1.0, engine.model_config.eos_token_ids)
    whole = -(-(len(prompt) + max_tokens) // 4)
    # The prompt's blocks are there once. Of the others each parent has some, and each child.
    assert (
        whole
        < engine.stats().peak_used_blocks
        <= len(prompt) // 4 + 2 * width * (1 + max_tokens // 4)
        < width * whole / 2
    )


def test_requests_beside_are_served_and_their_outputs_come_from_step(engine: CompiledEngine) -> None:
    alone = engine.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    for name, prompt in zip(("a", "b"), PROMPTS[:2], strict=True):
        engine.add_request(name, prompt, GREEDY)
    stream = engine.stream(PROMPTS[0], GREEDY)
    for output in engine.beam_search(PROMPTS, 4, 15, 1.0):
        check(output, 4, 15, 1.0, engine.model_config.eos_token_ids)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for name, expected_output in zip(("a", "b"), alone, strict=True):
        own = [output for output in outputs if output.request_id == name]
        assert [len(output.outputs[0].token_ids) for output in own] == list(range(1, 13))
        assert own[-1].outputs[0].token_ids == expected_output.outputs[0].token_ids
    assert {output.request_id for output in outputs} == {"a", "b"}
    assert [output.outputs[0].token_ids for output in stream][-1] == alone[0].outputs[0].token_ids


def test_beside_urgent_requests_that_take_their_places() -> None:
    sizes = {"block_size": 4, "bucket_sizes": (6,), "num_kv_blocks": 30, "max_model_len": 80}
    with CompiledEngine(**EAGER, **sizes, scheduling_policy="priority") as engine:
        for n in range(6):
            engine.add_request(f"{n}", PROMPTS[n % 3], GREEDY, priority=n - 3)
        for output in engine.beam_search(PROMPTS, 5, 20, 2.0):
            check(output, 5, 20, 2.0, engine.model_config.eos_token_ids)
        while engine.has_unfinished_requests():
            engine.step()
        assert engine.stats().num_preemptions > 0
        assert engine.stats().used_blocks == 0


def test_what_does_not_fit_ends_where_the_model_does(engine: CompiledEngine) -> None:
    prompt = list(token_ids(PROMPTS[0])) * 40
    prompt = prompt[: engine.runner.limits.max_model_len - 3]
    (output,) = engine.beam_search(prompt, 3, 50, 1.0, ignore_eos=True)
    check(output, 3, 3, 1.0, NO_EOS)


def test_one_bad_prompt_never_costs_the_others(engine: CompiledEngine) -> None:
    bad = ["", [10**6], {"text": "x"}, None, [5] * 300]
    outputs = engine.beam_search([PROMPTS[0], *bad, PROMPTS[1]], 3, 5)
    for output in (outputs[0], outputs[-1]):
        check(output, 3, 5, 1.0, engine.model_config.eos_token_ids)
    for output in outputs[1:-1]:
        (out,) = output.outputs
        assert out.finish_reason == "error"
        assert "must" in str(out.stop_reason)
    with pytest.raises(ValueError, match="prompt must not be empty"):
        engine.beam_search([PROMPTS[0], ""], 3, 5, raise_on_error=True)
    assert engine.beam_search([], 3, 5) == []


def test_a_model_without_a_tokenizer_gives_ids() -> None:
    with CompiledEngine(str(checkpoint("llama")), **EAGER, bucket_sizes=(4,), num_kv_blocks=32) as engine:
        (output,) = engine.beam_search([5, 6, 7], 4, 6)
        assert [out.text for out in output.outputs] == [""] * 4
        assert len({tuple(out.token_ids) for out in output.outputs}) == 4


# -- When something breaks


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("launch", 0),
        ("collect", 4),
        pytest.param("launch", 4, marks=pytest.mark.battery),
        pytest.param("collect", 0, marks=pytest.mark.battery),
    ],
)
def test_a_step_that_breaks_once_ends_no_search(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, where: str, after: int
) -> None:
    """Sixteen beams run at once: those of the first three prompts and some of the fourth."""
    break_once(monkeypatch, engine.runner, where, after, RuntimeError("the device is on fire"))
    before = engine.stats()
    for output in engine.beam_search([*PROMPTS, *PROMPTS], 5, 10):
        check(output, 5, 10, 1.0, engine.model_config.eos_token_ids)
    assert engine.stats().since(before).num_unexplained_faults == 1
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_a_fault_ends_the_search_and_leaves_an_engine_that_serves(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    with monkeypatch.context() as patch:
        break_once(patch, getattr(engine, owner), name, 3, Fault())
        with pytest.raises(Fault):
            engine.beam_search(PROMPTS, 4, 10)
    while engine.has_unfinished_requests():
        assert engine.step() == []
    for output in engine.beam_search(PROMPTS[:2], 4, 10):
        check(output, 4, 10, 1.0, engine.model_config.eos_token_ids)


def test_a_closed_engine_says_so() -> None:
    with CompiledEngine(**EAGER, bucket_sizes=(1,), num_kv_blocks=32, max_model_len=64) as closed:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        closed.beam_search(PROMPTS[0], 2, 4)
