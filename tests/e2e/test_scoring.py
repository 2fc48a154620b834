"""``score``: bitwise the log-probabilities of generating, whatever the batch, the chunks and the cache."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import (
    AsyncCompiledEngine,
    CompiledEngine,
    Logprob,
    RequestOutput,
    RequestsFailedWarning,
    SamplingParams,
    ScoreOutput,
)
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.drawn import marked
from tests.families import COMPILED_SIZES, checkpoint

TEXTS = [
    "def fib(n):",
    "import os",
    "class Stack:\n    def __init__(self",
    'def main():\n    """Read the files that the arguments name, and print the lines of each.\n\n    ',
    "x",
    "for key, value in sorted(items.items()):\n    if key not in",
]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
EAGER: dict[str, Any] = {"enforce_eager": True, "check_invariants": True, "num_kv_blocks": 200}
SIZES: dict[str, Any] = {"bucket_sizes": (1, 8), "dtype": "bfloat16"}
# Where a row's bits do not depend on the number of rows beside it.
EXACT: dict[str, dict[str, Any]] = {
    "bfloat16": SIZES | EAGER, "bfloat16 with an int8 cache": SIZES | EAGER | {"kv_cache_dtype": "int8"},
    "Gemma 2": SIZES | EAGER | {"model": str(checkpoint("gemma2")), "max_model_len": 200},
    "float32": SIZES | EAGER | {"dtype": "float32"},
    "float16 with an fp8 cache": SIZES | EAGER | {"dtype": "float16", "kv_cache_dtype": "fp8"},
    "compiled": EAGER | COMPILED_SIZES | {"enforce_eager": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(dtype="float32", bucket_sizes=(1, 8), max_model_len=256, **EAGER) as engine:
        yield engine


def prompts(engine: CompiledEngine) -> list[list[int]]:
    if engine.tokenizer is not None:
        return [engine.tokenizer.encode(text) for text in TEXTS]
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (3, 20, 50, 1, 33, 17)]


def own(output: RequestOutput) -> list[Logprob]:
    return [next(iter(row.values())) for row in output.outputs[0].logprobs or []]


def score(engine: CompiledEngine, outputs: list[RequestOutput], **options: Any) -> list[ScoreOutput]:
    """What was generated, scored in one batch."""
    continuations = [output.outputs[0].token_ids for output in outputs]
    options = {"top_logprobs": 2, "use_tqdm": False, "raise_on_error": True} | options
    return engine.score([output.prompt_token_ids for output in outputs], continuations, **options)


def check_equal(scores: list[ScoreOutput], outputs: list[RequestOutput]) -> None:
    """To the bit."""
    for found, output in zip(scores, outputs, strict=True):
        completion = output.outputs[0]
        assert found.error is None
        assert (found.token_ids, found.start) == (
            output.prompt_token_ids + completion.token_ids,
            len(output.prompt_token_ids),
        )
        assert found.logprobs == [logprob.logprob for logprob in own(output)]
        assert found.ranks == [logprob.rank for logprob in own(output)]
        assert found.top_logprobs == completion.logprobs
        assert found.cumulative_logprob == completion.cumulative_logprob


@pytest.mark.parametrize("kind", marked(EXACT, ("bfloat16 with an int8 cache", "compiled")))
def test_equal_to_the_bit_to_generating(kind: str) -> None:
    with CompiledEngine(**EXACT[kind]) as engine:
        ids = prompts(engine)
        outputs = engine.generate(ids * 2, [GREEDY] * len(ids) + [SAMPLED] * len(ids), use_tqdm=False)
        warm = score(engine, outputs)
        assert any(found.num_cached_tokens for found in warm)
        check_equal(warm, outputs)
        engine.reset_prefix_cache()
        check_equal(score(engine, outputs), outputs)
        for output in outputs:
            engine.reset_prefix_cache()
            (cold,) = score(engine, [output])
            assert cold.num_cached_tokens == 0
            check_equal([cold], [output])
            check_equal(score(engine, [output]), [output])
        greedy, sampled = warm[: len(ids)], warm[len(ids) :]
        assert all(found.is_greedy for found in greedy)
        assert not any(found.is_greedy for found in sampled)
    others = {"bucket_sizes": (3,), "max_num_batched_tokens": 16, "num_kv_blocks": 24, "block_size": 8}
    with CompiledEngine(**EXACT[kind] | EAGER | others) as engine:  # uncompiled, also what compiled code gave
        check_equal(score(engine, outputs), outputs)


@pytest.mark.parametrize("name", ["chunks", "overlap", "swap"])
def test_equal_to_transformers(engine: CompiledEngine, name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    others = {
        "chunks": {"max_num_batched_tokens": 16},
        "overlap": {"async_scheduling": True, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
        "swap": {"num_kv_blocks": 12, "swap_space_bytes": 2**24, "preemption_mode": "swap"},
    }
    sizes: dict[str, Any] = {"dtype": "float32", "bucket_sizes": (4,), "max_model_len": 128}
    with CompiledEngine(**EAGER | sizes | others[name]) as small:
        ids = prompts(small)
        alive = small.stream(ids[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        next(alive)  # it takes blocks beside those that are scored
        scores = small.score(ids[1:4] + ids[5:], use_tqdm=False, top_logprobs=-1)
        assert small.stats().num_output_tokens < 60
        alive.close()
    for found in scores:
        token_ids = torch.tensor([found.token_ids])
        with torch.no_grad():
            expected = model(token_ids).logits[0].double().log_softmax(-1)[:-1]
        wanted = expected.gather(1, token_ids[0, 1:, None])
        assert found.start == 1
        assert found.logprobs == pytest.approx(wanted.flatten().tolist(), abs=1e-4)
        ranks = (expected > wanted).sum(-1) + 1
        assert sum(rank != other for rank, other in zip(found.ranks, ranks.tolist(), strict=True)) <= 1  # ties
        assert found.top_logprobs is not None
        for row, top in zip(found.top_logprobs, expected.topk(20).values, strict=True):
            assert sorted((each.logprob for each in row.values()), reverse=True)[:20] == pytest.approx(
                top.tolist(), abs=1e-4
            )


class Steps:
    """The steps that an engine launches while this is in use."""

    def __init__(self, engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[SchedulerOutput] = []
        launch = engine._core.worker.launch

        def launch_and_keep(output: SchedulerOutput) -> Any:
            self.outputs.append(output)
            return launch(output)

        monkeypatch.setattr(engine._core.worker, "launch", launch_and_keep)

    @property
    def num_head_rows(self) -> int:
        return sum(len(ids) for output in self.outputs for _, _, ids in output.prompt_targets)

    @property
    def num_computed(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    @property
    def num_sampled(self) -> int:
        return sum(sum(output.num_samples) for output in self.outputs)


def test_only_what_is_asked_for_is_computed(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.reset_prefix_cache()
    before = engine.stats()
    steps = Steps(engine, monkeypatch)
    context, choices = list(range(100, 180)), [[7], [8, 9], [10, 11, 12]]
    scores = engine.score(context, choices, use_tqdm=False, raise_on_error=True)
    assert [found.start for found in scores] == [80] * 3
    assert [len(found.logprobs) for found in scores] == [1, 2, 3]
    # The last token of each is not computed. What the others share is computed once, up to the last whole block
    # before the token that predicts the first one that is scored.
    assert steps.num_computed == 80 + (79 % 16 + 2) + (79 % 16 + 3)
    assert steps.num_head_rows == 1 + 2 + 3
    assert steps.num_sampled == 0
    spent = engine.stats().since(before)
    assert (spent.num_output_tokens, spent.num_finished, spent.used_blocks) == (0, 3, 0)
    engine.reset_prefix_cache()
    for found, choice in zip(scores, choices, strict=True):
        (alone,) = engine.score([context + choice], use_tqdm=False)
        assert alone.logprobs[79:] == pytest.approx(found.logprobs, abs=1e-5)


def test_texts(engine: CompiledEngine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    text, rest = "def add(a, b):\n    return", " a + b\n"
    found, by_ids, whole = (
        engine.score(*arguments, use_tqdm=False, raise_on_error=True)[0]
        for arguments in [
            (text, rest),
            (text, tokenizer.encode(text + rest)[len(tokenizer.encode(text)) :]),
            (text + rest,),
        ]
    )
    assert found.prompt == whole.prompt == text + rest
    assert found.token_ids == by_ids.token_ids == whole.token_ids == tokenizer.encode(text + rest)
    assert found.start == by_ids.start == len(tokenizer.encode(text))
    assert found.logprobs == pytest.approx(by_ids.logprobs, abs=1e-5)
    assert found.logprobs == pytest.approx(whole.logprobs[found.start - 1 :], abs=1e-5)
    assert found.cumulative_logprob == pytest.approx(math.fsum(found.logprobs))
    salted = {"prompt": text, "cache_salt": "mine"}
    assert engine.score([salted], [rest], use_tqdm=False)[0].num_cached_tokens == 0
    assert engine.score([salted], [rest], use_tqdm=False)[0].token_ids == found.token_ids


def test_what_is_wrong_with_one_prompt_costs_no_other(engine: CompiledEngine) -> None:
    bad = [
        (["x"], [5]),
        ("", "x"),
        ("x", ""),
        ("x", []),
        ([5], "x"),
        ("x", None),
        ([5] * 200, [6] * 60),
        ([5], [10**9]),
    ]
    reasons = [
        "integers from 0",
        "must not be empty",
        "continuation must be a str or a list of token ids, and not empty",
        "and not empty",
        "where the prompt is one, or a chat",
        "given None",
        "at most 257 tokens with its continuation",
        "integers from 0 to 4095, given 1000000000",
    ]
    pairs = [([5, 6, 7], [8, 9]), *bad, ([5] * 200, [6] * 57)]
    scores = engine.score(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
    assert scores[0].error is scores[-1].error is None
    assert (len(scores[0].logprobs), len(scores[-1].logprobs)) == (2, 57)
    for found, reason in zip(scores[1:-1], reasons, strict=True):
        assert reason in str(found.error)
        assert (found.logprobs, found.ranks, found.cumulative_logprob, found.is_greedy) == ([], [], None, False)
    with pytest.raises(ValueError, match="and not empty"):
        engine.score("x", "", use_tqdm=False, raise_on_error=True)
    with pytest.warns(RequestsFailedWarning, match="at least two tokens"):
        engine.score([[5], [6]], use_tqdm=False)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["a", "b"], ["c"]), {}, "continuations must be as many as the prompts, 2 .* given 1"),
        ((["a"], []), {}, "given 0"),
        ((["a"],), {"top_logprobs": 21}, "top_logprobs must be an integer from -1 to 20, given 21"),
        ((["a"],), {"top_logprobs": True}, "top_logprobs must be an integer"),
        ((["a"],), {"priority": [1, 2]}, "priority must have as many"),
    ],
)
def test_bad_arguments(engine: CompiledEngine, arguments: tuple, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.score(*arguments, use_tqdm=False, **options)
    assert engine.score([], [], use_tqdm=False) == []


def test_no_text_of_tokens_is_made_that_nobody_sees(engine: CompiledEngine) -> None:
    (plain,) = engine.score("import os", use_tqdm=False)
    (with_tops,) = engine.score("import os", use_tqdm=False, top_logprobs=1)
    assert plain.top_logprobs is None
    assert with_tops.top_logprobs is not None
    assert all(found.decoded_token for row in with_tops.top_logprobs for found in row.values())
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1, detokenize=False)
    (output,) = engine.generate("import os", params, use_tqdm=False)
    rows = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]
    assert len(rows) > 2
    assert all(found.decoded_token is None for row in rows for found in (row or {}).values())


@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
def test_logits_that_are_not_finite(overlap: bool) -> None:
    sizes: dict[str, Any] = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "max_model_len": 64}
    with CompiledEngine(str(checkpoint("llama")), async_scheduling=overlap, **EAGER | sizes) as engine:
        with torch.no_grad():
            engine.runner.steps.weights.embedding.weight[200] = torch.nan
        good, bad, late = engine.score([[5, 6], [5, 200], [5, 6]], [[7, 8], [7, 8], [200]], use_tqdm=False)
        assert (good.error, len(good.logprobs)) == (None, 2)
        assert "logits are not finite" in str(bad.error)
        assert bad.logprobs == []
        assert late.error is None, "the token that is damaged is not computed"
        with pytest.warns(RequestsFailedWarning, match="logits are not finite"):
            engine.score([5, 200] * 20, use_tqdm=False)
        assert engine.stats().used_blocks == 0


def test_asyncio(engine: CompiledEngine) -> None:
    expected = engine.score(TEXTS[:4], [" a"] * 4, top_logprobs=1, use_tqdm=False)

    async def main() -> None:
        arguments = {"dtype": "float32", "bucket_sizes": (1, 8), "max_model_len": 256, **EAGER}
        async with AsyncCompiledEngine(**arguments) as served:
            scoring = [served.score(text, " a", top_logprobs=1) for text in TEXTS[:4]]
            generating = [served.generate("import", SamplingParams(temperature=0, max_tokens=9))]
            found, _ = await asyncio.gather(asyncio.gather(*scoring), collect(generating[0]))
            for one, other in zip(found, expected, strict=True):
                assert (one.token_ids, one.start, one.ranks) == (other.token_ids, other.start, other.ranks)
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
                assert one.top_logprobs is not None
            for arguments, message in [(("", " a"), "empty"), (("a", []), "not empty"), (("a",), "two tokens")]:
                with pytest.raises(ValueError, match=message):
                    await served.score(*arguments)
            with pytest.raises(ValueError, match="top_logprobs must be"):
                await served.score("a", " b", top_logprobs=21)
            task = asyncio.create_task(served.score(list(range(200)), [7]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (stats := await served.stats()).num_finished < stats.num_requests:
                await asyncio.sleep(0.001)
            assert stats.used_blocks == 0

    async def collect(outputs: Any) -> list[RequestOutput]:
        return [output async for output in outputs]

    asyncio.run(asyncio.wait_for(main(), 60))
