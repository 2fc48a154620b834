"""Behind the last attention an engine on a CPU computes the rows alone whose logits it wants: counted, and equal."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from tests.drafting_networks import record_drafts

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


def rows_of(engine: CompiledEngine, params: SamplingParams, prompt: str | list[int] = PROMPT) -> Counter[int]:
    """Of a step that computes a prompt."""
    counted = RowsOfProducts()

    def watch(output: Any, bucket: Any, run: Any) -> Any:
        with counted:
            return run()

    engine.own_runner.watch = watch
    engine.generate([prompt], params, use_tqdm=False)
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


def head_of(taps: list[int], directory: Path) -> str:
    """The bundled EAGLE-3 head, which reads these of the four layers' inputs; 4: what the last gives."""
    bundled = Path(DEMO_MODEL).with_name("demo_drafters") / "eagle3"
    shutil.copytree(bundled, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": taps}))
    return str(directory)


@pytest.mark.parametrize("kind", ["medusa", "medusa tree", "eagle3 of earlier layers", "eagle3"])
def test_heads_draft_the_same_behind_rows_of_logits(kind: str, tmp_path: Path) -> None:
    """Behind prompts, drafts that were right and wrong, and a prompt that is scored, which needs all rows."""
    config: dict[str, Any] = {"method": kind.split()[0], "num_speculative_tokens": 3, "adaptive": False}
    config["model"] = str(Path(DEMO_MODEL).with_name("demo_drafters") / "medusa")
    if config["method"] == "eagle3":
        config["model"] = head_of([1, 2, 3] if "earlier" in kind else [2, 3, 4], tmp_path / "head")
    if kind.endswith("tree"):
        config |= {"speculative_token_tree": "auto", "num_speculative_tokens": 5}
    engine = CompiledEngine(max_model_len=128, bucket_sizes=[1, 4], enforce_eager=True, speculative_config=config)
    with engine:
        steps = engine.own_runner.steps
        rows = rows_of(engine, SamplingParams(max_tokens=1, temperature=0))
        count = steps.model_config.num_layers
        assert rows == ({40: 4 * count, 1: 1} if kind == "eagle3" else {40: 4 * count - 3, 1: 4})
        found = record_drafts(engine)
        plain = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True, temperature=0.5) for seed in (5, 6)]
        scored = SamplingParams(max_tokens=9, temperature=0, seed=7, prompt_logprobs=0, ignore_eos=True)
        drafts = []
        for keeps_all in (False, True):
            steps.keeps_all_rows = keeps_all
            engine.reset_prefix_cache()
            engine.generate([PROMPT, OTHER], plain, use_tqdm=False)
            engine.generate([PROMPT[7:], OTHER[1:]], [plain[0], scored], use_tqdm=False)
            drafts.append({(one.token_ids, one.seed): one.drafts for one in found})
            found.clear()
        assert engine.stats().num_accepted_draft_tokens > 4
    both = drafts[0].keys() & drafts[1].keys()  # of a tree, the nodes that are verified follow from those before
    assert [drafts[0][key] for key in both] == [drafts[1][key] for key in both]
    assert len(both) > 12
