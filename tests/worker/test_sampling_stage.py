"""SamplingStage: what requests ask for, row by row, from admission to the tokens, uncompiled and without a model."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.compiling.argument_specs import ArgumentCheck
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.models.config_file import read_config
from compiled_llm.scheduling.bucket import Bucket, buckets_of
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.step.logits_transforms import Field, LogitsContext, LogitsTransform
from compiled_llm.step.logprobs import LogprobRows, logprob_rows
from compiled_llm.step.parameters import SAMPLING
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sampling_stage import SamplingNeeds, SamplingStage
from tests.families import checkpoint

CPU = torch.device("cpu")
LIMITS = EngineLimits(
    max_model_len=256,
    max_num_seqs=3,
    max_num_batched_tokens=256,
    block_size=16,
    decode_bucket_sizes=(2, 4),
    token_bucket_sizes=(256,),
    chunked_prefill=True,
)
MODEL = read_config(checkpoint("llama"))
VOCAB = MODEL.vocab_size
GREEDY = SamplingParams(temperature=0)


class Add(LogitsTransform):
    """Adds a vector to the first three logits, times the position."""

    name = "add"
    fields: Mapping[str, Field] = {"vector": Field((3,), torch.float32, 0.0), "times": Field((), torch.int64, 0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return {"vector": argument, "times": 1}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        added = fields["vector"] * fields["times"][:, None] * context.position[:, None]
        return torch.cat([logits[:, :3] + added, logits[:, 3:]], dim=1)


class Served:
    """A SamplingStage with all that surrounds it. A step's logits are given; ``step`` returns its tokens."""

    def __init__(
        self,
        transforms: tuple[LogitsTransform, ...] = (),
        num_draft_tokens: int = 0,
        uses_trees: bool = False,
        draft_trees: bool = False,
    ) -> None:
        limits = LIMITS.with_drafts(num_draft_tokens, one_graph=True, has_trees=draft_trees)
        sizes = sorted({bucket.num_rows for bucket in buckets_of(limits)})
        self.last_tokens = torch.zeros(sizes[-1], dtype=torch.int64)
        self.hidden = torch.zeros(256, MODEL.hidden_size)
        self.stage = SamplingStage(
            MODEL,
            limits,
            CPU,
            last_tokens=self.last_tokens,
            hidden=self.hidden,
            transforms=transforms,
            max_logprobs=5,
            dtype=torch.float32,
            uses_trees=uses_trees,
        )
        self.rows = RequestRows(LIMITS, VOCAB, transforms)
        self.kept: dict[str, bool] = {}
        for rows in sizes:
            logits = torch.randn(rows, VOCAB)
            self.stage.warm_up(bucket(rows), sampling_input(rows), functools.partial(torch.clone, logits), self.make)

    def make(self, function: Any, name: str, depends: Mapping[str, Any], keep: bool = True) -> CompiledFunction:
        self.kept[name] = keep
        return CompiledFunction(function, name, CPU, enforce_eager=True)

    def admit(self, *admissions: StartedRequest, released: Sequence[str] = ()) -> None:
        self.rows.update(SchedulerOutput(admissions=admissions, released_request_ids=tuple(released)))
        self.stage.admit(admissions, self.rows)

    def step(
        self,
        names: Sequence[str],
        logits: Tensor,
        *,
        samples: Sequence[int] | None = None,
        position: int = 0,
        masks: list | None = None,
        drafts: Sequence[Sequence[int]] = (),
        trees: Sequence[tuple[int, tuple[int, ...]]] = (),
    ) -> tuple[list[int], LogprobRows | None]:
        """``drafts``: of each request, of which the step samples one token more than there are."""
        samples = samples or [1 + len(own) for own in drafts] or [1] * len(names)
        tokens = [token for own in drafts or [[0] * (count - 1) for count in samples] for token in (0, *own)]
        output = SchedulerOutput(
            request_ids=tuple(names),
            num_samples=tuple(samples),
            num_scheduled_tokens=tuple(max(1, count) for count in samples),
            token_ids=tuple(tokens),
            masks=tuple(masks or ()),
            trees=tuple(trees),
        )
        rows = self.rows.update(output)
        needs = SamplingNeeds.of(rows, samples, self.rows)
        self.stage.fill(rows, output, self.rows, len(logits))
        self.last_tokens[: len(logits)] = logits.argmax(-1)  # as the step leaves it
        logprobs = self.stage.run(bucket(len(logits)), sampling_input(len(logits), position), logits, needs)
        return self.last_tokens[: sum(max(1, count) for count in samples)].tolist(), logprobs

    def counts(self, name: str) -> dict[int, float]:
        row = self.stage._token_counts[self.rows.row_of(name)]
        return {int(token): row[token].item() for token in row.nonzero().flatten()}


def bucket(rows: int) -> Bucket:
    return Bucket("decode", rows, rows)


def sampling_input(rows: int, position: int = 0) -> SamplingInput:
    """All greedy."""
    padding = {str(line.name): torch.full((rows,), line.padding, dtype=line.dtype) for line in SAMPLING}
    return SamplingInput(**padding, position=torch.full((rows,), position, dtype=torch.int32))


def admission(name: str, prompt: Sequence[int] = (50,), output: Sequence[int] = (), **params: Any) -> StartedRequest:
    return StartedRequest(name, SamplingParams(temperature=0, **params), 0, tuple(prompt), tuple(output))


def rising(rows: int) -> Tensor:
    """Logits whose likeliest token is the last, by steps of 1."""
    return torch.arange(VOCAB).float().repeat(rows, 1) - VOCAB


# -- What is needed


def test_only_rows_whose_token_is_due_want_something() -> None:
    store = RequestRows(LIMITS, VOCAB)
    asks = {
        "greedy": GREEDY,
        "hot": SamplingParams(),
        "all": SamplingParams(temperature=0, logprobs=0, presence_penalty=1.0, prompt_logprobs=2),
    }
    step = SchedulerOutput(
        request_ids=tuple(asks),
        admissions=tuple(StartedRequest(name, params, 0, (), ()) for name, params in asks.items()),
    )
    rows = store.update(step)
    assert SamplingNeeds.of(rows, [True, False, False], store) == (False, False, False)
    assert SamplingNeeds.of(rows, [True, True, False], store) == (True, False, False)
    assert SamplingNeeds.of(rows, [False, False, True], store) == (False, True, True)
    assert SamplingNeeds.of(rows, [True, True, True], store) == (True, True, True)
    assert SamplingNeeds.of(rows[1:], [False, True], store) == (False, True, True)


# -- Functions


@pytest.mark.parametrize("uses_trees", [False, True])
def test_a_function_of_each_kind_serves_all_numbers_of_rows_unless_torch_records_graphs(uses_trees: bool) -> None:
    served = Served(uses_trees=uses_trees)
    kinds = {"sample", "sample_changed", "logprobs"}
    if uses_trees:
        kinds = {f"{kind}_{rows}" for kind in kinds for rows in (2, 4)}
    assert served.stage.functions().keys() == kinds == set(served.kept)
    assert all(served.kept.values())


def test_what_holds_a_users_code_is_not_kept_on_disk_nor_compiled_elsewhere() -> None:
    served = Served((Add(),))
    assert {name for name, keep in served.kept.items() if not keep} == {"sample_changed"}
    inputs = {rows: sampling_input(rows) for rows in (2, 4)}
    arguments = inputs, torch.empty, (), 4.0
    assert {job.name for job in served.stage.jobs(*arguments)} == {"sample", "logprobs", "prompt_logprobs"}
    plain = {job.name for job in Served().stage.jobs(*arguments)}
    assert plain - {job.name for job in served.stage.jobs(*arguments)} == {"sample_changed"}


def test_a_second_bucket_of_as_many_rows_has_the_same_functions() -> None:
    served = Served()
    before = served.stage.functions()
    served.stage.warm_up(Bucket("tokens", 256, 4), sampling_input(4), lambda: torch.randn(4, VOCAB), served.make)
    assert served.stage.functions() == before


def test_logits_of_a_step_are_not_kept() -> None:
    """A vocabulary of 150,000 tokens has 300 KB of them a row, and on a CPU steps have any number of rows."""
    stage, needs = Served().stage, SamplingNeeds(sampling=True, changed_logits=False, logprobs=True)
    logits = torch.randn(2, VOCAB)
    for kind in ("sample", "logprobs"):
        arguments = stage._arguments(kind, 2, logits, sampling_input(2))
        stage._functions[kind]._check = ArgumentCheck(arguments)  # as a compiled function has it
    kept = weakref.ref(logits)
    stage.run(bucket(2), sampling_input(2), logits, needs)
    del logits, arguments
    assert kept() is None


# -- Counts of tokens


def test_counts_are_of_prompt_and_output_and_go_on_with_each_token_that_is_due() -> None:
    served = Served()
    served.admit(
        admission("a", [5, 5, 7], presence_penalty=0.5),
        admission("b", [5, 6], [6, 6, 9], frequency_penalty=0.5),  # again after a preemption
    )
    assert served.counts("a") == {5: 0.5, 7: 0.5}
    assert served.counts("b") == {5: 0.5, 6: 2.5, 9: 1}
    logits = rising(4)
    logits[1, 6] = 100
    tokens, logprobs = served.step(["a", "b"], logits)
    assert (tokens, logprobs) == ([VOCAB - 1, 6], None)
    served.step(["b", "a"], logits, samples=[1, 0])
    assert served.counts("a") == {5: 0.5, 7: 0.5, VOCAB - 1: 1}
    assert served.counts("b") == {5: 0.5, 6: 3.5, 9: 1, VOCAB - 1: 1}
    assert not served.stage._token_counts[LIMITS.max_num_seqs].any(), "padding is counted"


def test_a_row_begins_anew_with_each_request() -> None:
    served = Served((Add(),))
    everything = {
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 2.0,
        "logit_bias": {9: 50.0, 0: 3.0},
        "logits_transforms": {"add": [1e3, 0, 0]},
    }
    served.admit(admission("a", [1, 2], [3], **everything))
    assert served.step(["a"], rising(2), position=1)[0] == [0]
    served.admit(admission("b", [4], **{"presence_penalty": 1.0}), released=["a"])
    assert served.counts("b") == {4: 0.5}
    row = served.rows.row_of("b")
    arrays = served.rows.parameters
    off = {"presence_penalty": 1, "frequency_penalty": 0, "repetition_penalty": 1, ("add", "times"): 0}
    assert {name: arrays[name][row] for name in off} == off
    assert not arrays["biases"][row].any()
    assert not arrays["add", "vector"][row].any()
    assert served.step(["b"], rising(2), position=1)[0] == [VOCAB - 1]


# -- Rows of a step


def test_each_row_of_a_step_gets_what_its_request_asks_for() -> None:
    served = Served((Add(),))
    served.admit(
        admission("bias", logit_bias={3: 99.0, VOCAB - 1: -1.0}),
        admission("repetition", [VOCAB - 1], repetition_penalty=3.0),
        admission("transform", logits_transforms={"add": [0.0, 10.0, 0.0]}),
    )
    logits = rising(4) + VOCAB + 50  # all positive
    expected = {"bias": VOCAB - 2, "repetition": VOCAB - 2, "transform": 1}
    logits[:, 3] = 40
    assert served.step(list(expected), logits, position=40)[0] == list(expected.values())
    expected["repetition"] = VOCAB - 3  # the next one is in its output now
    for order in (["repetition", "transform"], ["transform", "bias"], ["bias"]):
        assert served.step(order, logits[:2], position=40)[0] == [expected[name] for name in order]
    assert served.step(["transform"], logits[:2], position=1)[0] == [VOCAB - 1], "10 is not enough at position 1"


def test_masks_hold_for_one_step_and_their_row() -> None:
    served = Served()
    served.admit(admission("a", bad_words="x"), admission("b", bad_words="x"))
    words = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
    words[1] = 0b1010  # tokens 33 and 35
    assert served.step(["a", "b"], rising(4), masks=[(1, 0, words.numpy())])[0] == [VOCAB - 1, 35]
    assert served.step(["b", "a"], rising(4), masks=[(1, 0, words.numpy())])[0] == [VOCAB - 1, 35]
    assert served.step(["a", "b"], rising(4))[0] == [VOCAB - 1] * 2


def test_a_request_after_one_with_drafts_keeps_its_own_parameters_and_mask() -> None:
    """``a`` has two rows, so that ``b``, the second request of the step, has the third."""
    served = Served(num_draft_tokens=1)
    served.admit(admission("a"), admission("b", [VOCAB - 1], bad_words="x", repetition_penalty=5.0))
    logits = rising(4) + VOCAB + 50
    assert served.step(["a", "b"], logits, samples=[2, 1])[0] == [VOCAB - 1, VOCAB - 1, VOCAB - 2]
    assert served.counts("b") == {VOCAB - 1: 0.5, VOCAB - 2: 1}
    words = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    words[1] = 0b1010  # tokens 33 and 35
    masks = [(1, 0, words)]
    assert served.step(["a", "b"], logits, samples=[2, 1], masks=masks)[0] == [VOCAB - 1, VOCAB - 1, 35]
    # 35 is in its output now.
    assert served.step(["b", "a"], logits, samples=[1, 2], masks=[(0, 0, words)])[0] == [33, VOCAB - 1, VOCAB - 1]


@pytest.mark.parametrize("draft_trees", [False, True])
def test_a_row_after_drafts_is_penalised_for_them_and_counts_if_they_were_right(draft_trees: bool) -> None:
    """Descending logits: token 0, then what penalties leave. ``b`` has no drafts, and stands between."""
    served = Served(num_draft_tokens=3, draft_trees=draft_trees)
    logits = torch.arange(VOCAB, 0, -1, dtype=torch.float32).repeat(8, 1) / 10
    served.admit(*(admission(name, [50], frequency_penalty=2.0) for name in "abc"))
    right, wrong = [0, 1, 2], [0, 7, 2]
    tokens, _ = served.step(["a", "b", "c"], logits[:8], drafts=[right, [], wrong[:2]])
    assert tokens == [0, 1, 2, 3, 0, 0, 1, 1]
    assert served.counts("a") == {50: 0.5, 0: 1, 1: 1, 2: 1, 3: 1}
    assert served.counts("b") == {50: 0.5, 0: 1}
    assert served.counts("c") == {50: 0.5, 0: 1, 1: 1}, "the token after the wrong draft counts no more"
    tokens, _ = served.step(["c", "a"], logits[:4], drafts=[[3, 3], []])
    assert tokens == [2, 3, 4, 4] or tokens[0] == 2
    assert served.counts("c") == {50: 0.5, 0: 1, 1: 1, 2: 1}


def test_rows_of_a_tree_are_penalised_for_their_own_paths() -> None:
    """Of ``a``'s drafts 0, then 1 or 7, and 2 after 1; ``b``'s first is wrong, its second right, and right again."""
    served = Served(num_draft_tokens=4, draft_trees=True)
    logits = torch.arange(VOCAB, 0, -1, dtype=torch.float32).repeat(16, 1) / 10
    served.admit(*(admission(name, [50], frequency_penalty=2.0) for name in "ab"))
    trees = [(0, (0, 1, 1, 3)), (1, (0, 0, 2))]
    tokens, _ = served.step(["a", "b"], logits, drafts=[[0, 7, 1, 2], [7, 0, 1]], trees=trees)
    assert tokens == [0, 1, 1, 2, 3, 0, 0, 1, 2]
    assert served.counts("a") == {50: 0.5, 0: 1, 1: 1, 2: 1, 3: 1}
    assert served.counts("b") == {50: 0.5, 0: 1, 1: 1, 2: 1}


def test_each_row_after_drafts_has_its_own_mask() -> None:
    served = Served(num_draft_tokens=3)
    served.admit(admission("a"), admission("b", bad_words="x"))
    masks = []
    for place, token in enumerate((33, 40, 64)):
        words = np.zeros(-(-VOCAB // 32), dtype=np.int32)
        words[token // 32] = 1 << token % 32
        masks.append((1, place, words))
    tokens, _ = served.step(["a", "b"], rising(8), drafts=[[5], [33, 7]], masks=masks)
    assert tokens == [VOCAB - 1, VOCAB - 1, 33, 40, 64]


@pytest.mark.parametrize("asks", [{}, {"presence_penalty": 1.0}])
def test_logprobs_are_of_the_token_chosen_under_the_models_own_logits(asks: dict[str, Any]) -> None:
    served = Served()
    served.admit(admission("a", logprobs=2, **asks), admission("b", logit_bias={7: 100.0}))
    logits = torch.randn(2, VOCAB) * 3
    for _ in range(3):
        tokens, logprobs = served.step(["a", "b"], logits)
        assert logprobs is not None
        for found, wanted in zip(logprobs, logprob_rows(logits, torch.tensor(tokens), 5), strict=True):
            assert torch.equal(found, wanted)
        assert tokens[1] == 7
    assert served.step(["b"], logits)[1] is None


# -- Prompts


def test_log_probabilities_of_prompts_in_pieces_of_any_size() -> None:
    served = Served()
    served.hidden[:] = torch.randn(256, MODEL.hidden_size)
    head = torch.randn(VOCAB, MODEL.hidden_size)
    seen: list[int] = []

    def function(weights: Any, rows: tuple[Tensor, Tensor], hidden: Tensor) -> LogprobRows:
        seen.append(len(rows[0]))
        return logprob_rows(hidden[rows[0]] @ head.T, rows[1], 5)

    prompts = CompiledFunction(function, "prompt_logprobs", CPU, enforce_eager=True)
    prompts.warm_up(lambda: served.stage._prompt_arguments(()))
    served.stage._functions["prompt_logprobs"] = prompts
    # Tokens of each request; request -> (place of the first token that is asked for, how many are).
    steps: list[tuple[list[int], dict[int, tuple[int, int]]]] = [
        ([1], {0: (0, 1)}),
        ([3, 150, 1, 60], {1: (1, 149), 3: (0, 60)}),
        ([64, 64], {0: (0, 64), 1: (0, 64)}),
        ([7, 9, 5], {1: (6, 2), 2: (4, 1)}),
    ]
    for counts, wanted in steps:
        targets = tuple(
            (index, place, tuple(torch.randint(VOCAB, (count,)).tolist())) for index, (place, count) in wanted.items()
        )
        seen.clear()
        found = served.stage.prompt_logprobs(
            (), SchedulerOutput(num_scheduled_tokens=tuple(counts), prompt_targets=targets), served.rows
        )
        places = [sum(counts[:index]) + place + j for index, place, ids in targets for j in range(len(ids))]
        ids = torch.tensor([token for _, _, tokens in targets for token in tokens])
        assert seen == [64] * -(-len(ids) // 64)
        for column, expected in zip(found, logprob_rows(served.hidden[places] @ head.T, ids, 5), strict=True):
            torch.testing.assert_close(column, expected)
