"""Behind the last attention an engine on a CPU computes the rows alone whose logits it wants: counted, and equal."""

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_llm import CompiledEngine, SamplingParams

PROMPT, OTHER = list(range(20, 60)), list(range(300, 311))


class RowsOfProducts(TorchDispatchMode):
    """Counts the rows that products of linear layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "compiled_llm::packed_linear":
            self.rows[len(args[0])] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def engine() -> Any:
    with CompiledEngine(max_model_len=128, bucket_sizes=[1, 4], enforce_eager=True) as engine:
        yield engine


def rows_of(engine: CompiledEngine, params: SamplingParams) -> Counter[int]:
    """Of a step that computes a prompt."""
    counted = RowsOfProducts()

    def watch(output: Any, bucket: Any, run: Any) -> Any:
        with counted:
            return run()

    engine.own_runner.watch = watch
    engine.generate([PROMPT], params, use_tqdm=False)
    engine.own_runner.watch = None
    engine.reset_prefix_cache()
    return counted.rows


def test_a_prompts_last_layer_computes_one_row(engine: CompiledEngine) -> None:
    count = engine.own_runner.steps.model_config.num_layers
    rows = rows_of(engine, SamplingParams(max_tokens=1, temperature=0))
    assert rows == {40: 4 * count - 3, 1: 4}, "of the last layer's four all but the first, and the head"


def test_a_prompt_that_is_scored_needs_all_rows(engine: CompiledEngine) -> None:
    count = engine.own_runner.steps.model_config.num_layers
    rows = rows_of(engine, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    assert rows == {40: 4 * count, 1: 1}


def test_results_are_those_of_all_rows(engine: CompiledEngine) -> None:
    """Scored and not, alone and together, sampled and greedy, with log-probabilities: equal to the bit."""
    scored = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1)
    plain = SamplingParams(max_tokens=6, seed=4, logprobs=2)

    def results(prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        engine.reset_prefix_cache()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]

    steps = engine.own_runner.steps
    alone = results([PROMPT], [plain]) + results([OTHER], [scored])
    assert results([PROMPT, OTHER], [plain, scored]) == alone
    steps.keeps_all_rows = True
    try:
        assert results([PROMPT], [plain]) + results([OTHER], [scored]) == alone
    finally:
        steps.keeps_all_rows = False
