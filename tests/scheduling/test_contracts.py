"""What crosses between scheduler and worker is frozen, plain and picklable; a ``Request`` is written in one room."""

import ast
import dataclasses
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.scheduling.worker import LogprobColumns, StepResult

METHODS = {"end", "add_drafts", "cancel_drafts"}  # of a request, that change it
PACKAGE = Path(__file__).parents[2] / "compiled_llm"
COLUMNS = LogprobColumns((-0.5, -1.0), (1, 2), ((-0.5, -1.0), (-0.75, -1.0)), ((4, 7), (5, 7)))
CONTRACTS = [
    SchedulerOutput(
        request_ids=("a",),
        num_scheduled_tokens=(3,),
        num_computed_tokens=(0,),
        num_samples=(1,),
        feedback=(-1,),
        token_ids=(1, 2, 3),
        admissions=(StartedRequest("a", SamplingParams(temperature=0), 5, (1, 2, 3), ()),),
        table_updates=(("a", 0, (1, 2)),),
        released_request_ids=("b",),
        swapped_out=((1, 1),),
        swapped_in=((2, 1),),
        copies=((2, 3),),
        resets=True,
        prompt_targets=((0, 0, (2, 3)),),
    ),
    StepResult(Bucket("decode", 2, 2), (4, 7), COLUMNS, COLUMNS, 0.25),
    Bucket("tokens", 16, 4),
]
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add", "update", "setdefault"}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: type(contract).__name__)
def test_contracts_are_frozen_and_go_through_a_pipe(contract: Any) -> None:
    assert pickle.loads(pickle.dumps(contract)) == contract
    names = contract._fields if isinstance(contract, tuple) else [field.name for field in dataclasses.fields(contract)]
    for name in names:
        with pytest.raises(AttributeError):
            setattr(contract, name, getattr(contract, name))
        assert is_plain(getattr(contract, name)), name


def is_plain(value: Any) -> bool:
    """Whether nothing within ``value`` can be changed."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    frozen = dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return frozen or isinstance(value, str | int | float | bytes | None)


def test_no_column_can_be_changed_through_the_builder() -> None:
    builder = SchedulerOutputBuilder()
    builder.request_ids.append("a")
    built = builder.build(resets=True)
    builder.request_ids.append("b")
    assert built == SchedulerOutput(request_ids=("a",), resets=True)
    assert {*vars(builder), "resets"} == {*SchedulerOutput._fields}


def test_a_mask_goes_through_a_pipe() -> None:
    builder = SchedulerOutputBuilder()
    builder.masks.append((0, 0, np.ones(3, dtype=np.int32)))
    assert pickle.loads(pickle.dumps(builder.build())).masks[0][2].tolist() == [1, 1, 1]


# -- Who writes to a request

REQUEST = re.compile("(request|parent|child|children|other|victim)s?")
SHARED_FIELDS = {"request_id", "prompt_token_ids", "num_computed_tokens", "seed", "priority"}  # with other classes


def writes_to_requests(source: str) -> Iterator[str]:
    """Statements that set a field of a request or change a list of one.

    A name is a request if it is called ``request``, ``parent``, ``child`` or the like, or ends in ``.request``; and in
    any case if the field is one that only a ``Request`` has.
    """
    fields = {field.name for field in dataclasses.fields(Request)}
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            targets = [ast.Attribute(node.func.value, "seed")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            targets = [ast.Attribute(node.args[0], "seed")]
        for target in flat(targets):
            inner = target
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            if not isinstance(inner, ast.Attribute) or inner.attr not in fields:
                continue
            owner = re.sub(r"\[.*\]$", "", ast.unparse(inner.value)).split(".")[-1]
            if REQUEST.fullmatch(owner) or (owner != "self" and inner.attr not in SHARED_FIELDS):
                yield ast.unparse(node)


def flat(targets: list[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def test_only_the_scheduling_room_writes_to_a_request() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "scheduling"]
    assert len(files) > 50
    found = {path.name: list(writes_to_requests(path.read_text())) for path in files}
    assert not {name: writes for name, writes in found.items() if writes}
    inside = [list(writes_to_requests(path.read_text())) for path in (PACKAGE / "scheduling").glob("*.py")]
    assert sum(map(len, inside)) > 40, "the test sees no writes where there are many"


@pytest.mark.parametrize(
    "source",
    [
        "request.finish_reason = 'stop'",
        "completion.request.finish_reason, x = 'stop', None",
        "del self.request.output_token_ids[-1]",
        "request.output_token_ids.append(5)",
        "parent.block_ids += [3]",
        "self.completions[0].request.num_scored = 5",
        "entry.requests[0].num_computed_tokens -= 1",
        "setattr(request, name, 1)",
        "completion.request.end('stop', None)",
    ],
)
def test_a_write_to_a_request_is_seen(source: str) -> None:
    assert list(writes_to_requests(source))
    assert list(writes_to_requests(f"class A:\n    def run(self, request):\n        {source}\n"))
