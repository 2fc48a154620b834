"""Two and four ranks sample what one process samples, to the bit, and nobody gathers logits: all kinds of requests."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, Field, LogitsTransform, SamplingParams
from tests.e2e.test_draft_model import facts
from tests.families import COMPILED_SIZES
from tests.forked_workers import forked_workers  # noqa: F401 - a fixture

ARGUMENTS: dict[str, Any] = {
    "tensor_parallel_exact": True, "num_threads": 1, "enforce_eager": True, "max_model_len": 96, "num_kv_blocks": 60,
    "max_logprobs": 5,  # of so many likeliest tokens this vocabulary is not sorted
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
LAYER_SKIP = {"method": "layer_skip", "num_speculative_tokens": 3, "adaptive": False}
# Two ranks have tokens 0 to 2,047 and the rest.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9, "presence_penalty": 1.0},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-c]{6}"}},
    {"temperature": 0.9, "top_p": 0.9, "n": 2},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_n_sigma": 1.0},
    {"temperature": 1.0, "logit_bias": {5: 3.0, 3000: 4.0, 2047: -5.0, 2048: 5.0}},
    {"temperature": 1.0, "bad_words": ["the"], "min_tokens": 4},
    {"temperature": 1.0, "allowed_token_ids": [7, 2047, 2048, 4000]},
    {"temperature": 0, "logit_bias": {4000: 50.0, 3: 1.0}},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
]


class Lift(LogitsTransform):
    """Needs all logits: makes the last token likelier."""

    name = "lift"
    fields = {"by": Field((), torch.float32, 0.0)}  # noqa: RUF012

    def row(self, argument: Any, vocab_size: int) -> dict[str, Any]:
        return {"by": argument}

    def __call__(self, logits: Any, fields: Any, context: Any) -> Any:
        return torch.cat([logits[:, :-1], logits[:, -1:] + fields["by"][:, None]], dim=1)


def requests(kinds: Sequence[dict[str, Any]]) -> tuple[list[str], list[SamplingParams]]:
    """Thirty-six, some of which ask for log-probabilities of what they generate or of their prompts."""
    params = []
    for i in range(36):
        more: dict[str, Any] = {"logprobs": i % 4} if i % 5 else {}
        more |= {"prompt_logprobs": 3} if i % 7 == 0 else {}
        params.append(SamplingParams(max_tokens=12, seed=i, **more, **kinds[i % len(kinds)]))
    return [f"The ship went {i} abc abc" for i in range(36)], params


def served(size: int, kinds: Sequence[dict[str, Any]] = KINDS, **arguments: Any) -> tuple[list[Any], Any, Any]:
    """Outputs, statistics and the report of what was compiled."""
    with CompiledEngine(**{**ARGUMENTS, **arguments}, tensor_parallel_size=size) as engine:
        prompts, params = requests(kinds)
        outputs = engine.generate(prompts, params, use_tqdm=False, raise_on_error=True)
        return [facts(one) for one in outputs], engine.stats(), engine.compile_report()


def test_two_ranks_sample_what_one_process_samples() -> None:
    assert served(2, speculative_config=NGRAM)[0] == served(1, speculative_config=NGRAM)[0]


@pytest.mark.battery
@pytest.mark.parametrize("config", [None, NGRAM, LAYER_SKIP], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_and_four_ranks(dtype: str, config: dict[str, Any] | None) -> None:
    arguments = {"dtype": dtype, "speculative_config": config}
    wanted, stats, _ = served(1, **arguments)
    assert config is None or stats.num_accepted_draft_tokens > 0
    for size in (2, 4):
        assert served(size, **arguments)[0] == wanted


@pytest.mark.battery
def test_compiled_ranks() -> None:
    arguments = {**COMPILED_SIZES, "enforce_eager": False, "dtype": "bfloat16", "speculative_config": LAYER_SKIP}
    wanted = served(1, **arguments)[0]
    found, _, report = served(2, **arguments)
    assert found == wanted
    assert {(one.graphs, one.graph_breaks, one.recompiles) for one in report.reports} == {(1, 0, 0)}


@pytest.mark.battery
@pytest.mark.parametrize("size", [2, 4])
def test_what_needs_all_logits_gathers_them(size: int) -> None:
    """A user's transform; and more likeliest tokens than are sorted by chunks."""
    kinds = [*KINDS, {"temperature": 1.0, "logits_transforms": {"lift": 9.0}, "presence_penalty": 0.5}]
    more = {"logits_transforms": [Lift()], "max_logprobs": 20}
    assert served(size, kinds, **more)[0] == served(1, kinds, **more)[0]
