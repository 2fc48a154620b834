"""Where two settings of the matrix begin to differ: the token, the layer and the op.

Both settings serve the same requests again while every op that a step calls is watched, compiled or not: what goes into
it and what comes out, of one request's tokens. An op's result depends on earlier ops of the same token and, through
attention, on earlier tokens. So in the order of tokens, and of ops within a token, the first difference has no other
before it.

- An op's result differs and what went into it is equal: the op is where the settings part.
- What goes into an op differs and what the ops before it gave is equal: it is the code between them, which the compiler
  made of plain torch. Its ops are those that the uncompiled step calls there.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.exact.matrix import Request, Setting, batches, row_digests, serve
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops.torch_private import TorchDispatchMode
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput

_BEFORE_LAYERS = ("inputs", "embedding", "ropes")  # and families' layers are in "layers"

MakeEngine = Callable[[Setting], CompiledEngine]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op in a step, the same in all steps of a model.

    Attributes:
        where: the weight or KV cache that it takes, as "layers.3.mlp.down"; else the layer of the call before.
        op: its name, as "compiled_llm::packed_linear".
        number: how many calls with the same two were before it.
    """

    where: str
    op: str
    number: int

    def __str__(self) -> str:
        return f"{self.where}: {self.op}" + (f" (call {self.number + 1})" if self.number else "")


@dataclasses.dataclass(frozen=True)
class Seen:
    """A tensor that goes into a call (``is_result=False``) or comes out of it: the ``number``-th of them."""

    call: Call
    is_result: bool
    number: int


# A token's digests in one step, in the order of the calls.
Digests = dict[Seen, int]


@dataclasses.dataclass(frozen=True)
class Departure:
    """Where two settings part.

    Attributes:
        position: of the token.
        seen: the first tensor that differs.
        before: the last call of both whose results are equal, if there is one.
        between: for a tensor that goes into a call: names of the ops between the two calls in the uncompiled step.
        only_compiled: whether the same two settings agree when both are uncompiled; None where one of the two was.
        difference: how many elements differ, and by how much.
    """

    position: int
    seen: Seen
    before: Call | None
    between: tuple[str, ...] = ()
    only_compiled: bool | None = None
    difference: str = ""

    def __str__(self) -> str:
        call = self.seen.call
        if self.seen.is_result:
            place = f"{call}: its result differs, and all that goes into it is equal"
        else:
            start = f"after {self.before}" if self.before else "from the start of the step"
            ops = f" ({', '.join(self.between)})" if self.between else ""
            place = f"the code between the ops{ops}, {start}, before {call}"
        only = {True: "; only when compiled", False: "; uncompiled too", None: ""}[self.only_compiled]
        return f"at position {self.position}, {place}: {self.difference}{only}"

    def as_json(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "where": self.seen.call.where,
            "op": self.seen.call.op,
            "is_result": self.seen.is_result,
            "after": str(self.before) if self.before else None,
            "between": list(self.between),
            "only_compiled": self.only_compiled,
            "difference": self.difference,
        }


class OpTrace(TorchDispatchMode):
    """The ``watch`` of a runner that digests what every op takes and gives, of one request's tokens.

    Args:
        keep: (position, tensor) to keep as it is.

    Attributes:
        digests: by position, for each step that computed it.
        kept: the rows of ``keep``.
    """

    def __init__(self, engine: CompiledEngine, request_id: str, keep: tuple[int, Seen] | None = None) -> None:
        super().__init__()
        self.digests: defaultdict[int, list[Digests]] = defaultdict(list)
        self.kept: list[Tensor] = []
        self._request_id, self._keep = RequestId(request_id), keep
        self._steps = steps = engine.own_runner.steps
        self._names: dict[int, str] = {}
        for name, pointer in _pointers(steps.weights):
            self._names.setdefault(pointer, name)  # a head that is tied to the embedding has its name
        for layer, cache in enumerate(steps.kv_cache):
            for tensor in _tensors(cache):
                self._names.setdefault(tensor.data_ptr(), f"layers.{layer}.attention")
        self._skipped = {*self._names, steps.hidden.data_ptr()}  # it holds what the step before left
        engine.own_runner.watch = self
        engine.own_runner.steps.keeps_all_rows = True  # hidden states of all tokens are compared

    def __call__(self, output: SchedulerOutput, bucket: Bucket, run: Callable[[], Tensor]) -> Tensor:
        if self._request_id not in output.request_ids:
            return run()
        index = output.request_ids.index(self._request_id)
        start, count = sum(output.num_scheduled_tokens[:index]), output.num_scheduled_tokens[index]
        first = output.num_computed_tokens[index]
        # Number of rows of a tensor -> where this request is in it, and the positions of these rows.
        step_input = self._steps.buffers[bucket].step_input
        num_tokens, num_rows = len(step_input.input_ids), len(step_input.logits_indices)
        self._of_tokens = {num_tokens: (slice(start, start + count), range(first, first + count))}
        self._of_rows = {num_rows: (slice(index, index + 1), range(first + count - 1, first + count))}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._where, self._in_head = "inputs", False
        self._logits_indices = step_input.logits_indices.data_ptr()
        self._step = {position: Digests() for position in range(first, first + count)}
        with self:
            logits = run()
        for position, digests in self._step.items():
            self.digests[position].append(digests)
        return logits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, func._schema.name
        taken = [tensor for tensor in _tensors((args, kwargs)) if tensor is not kwargs.get("out")]
        name = next((found for tensor in taken if (found := self._names.get(tensor.data_ptr()))), None)
        if name is not None:
            is_head = name == "embedding" and not self._where.startswith(_BEFORE_LAYERS)
            self._where = "head" if is_head else name
            self._in_head = not self._where.startswith(("layers", *_BEFORE_LAYERS))
        elif self._where.count(".") > 1:  # only the layer is known
            self._where = ".".join(self._where.split(".")[:2])
        call = Call(self._where, op, self._calls[self._where, op])
        self._calls[self._where, op] += 1
        self._note(call, False, taken)
        self._in_head |= any(tensor.data_ptr() == self._logits_indices for tensor in taken)
        result = func(*args, **kwargs)
        self._note(call, True, list(_tensors(result)))
        return result

    def _note(self, call: Call, is_result: bool, tensors: list[Tensor]) -> None:
        # Where a step has as many tokens as rows of logits, the two are told apart by whose turn it is.
        known = self._of_tokens | self._of_rows if self._in_head else self._of_rows | self._of_tokens
        for number, tensor in enumerate(tensors):
            if not tensor.dim() or not tensor.is_floating_point() or tensor.data_ptr() in self._skipped:
                continue
            rows, positions = known.get(tensor.shape[0], (slice(0), range(0)))
            seen = Seen(call, is_result, number)
            for position, digest in zip(positions, row_digests(tensor[rows]), strict=True):
                self._step[position][seen] = digest
                if self._keep == (position, seen):
                    self.kept.append(tensor[rows][position - positions.start].detach().clone())


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _pointers(weights: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """(name, address) of all tensors in a model's weights; those of a linear layer have the layer's name."""
    if isinstance(weights, Tensor):
        yield name, weights.data_ptr()
    elif isinstance(weights, tuple):
        fields = getattr(weights, "_fields", None) or map(str, range(len(weights)))
        for field, value in zip(fields, weights, strict=True):
            yield from _pointers(value, name if isinstance(weights, Linear) else f"{name}.{field}".strip("."))


def trace(
    setting: Setting,
    requests: Sequence[Request],
    index: int,
    make_engine: MakeEngine,
    keep: tuple[int, Seen] | None = None,
) -> OpTrace:
    """Serve the requests of a setting again, and watch the one of ``index``."""
    with make_engine(setting) as engine:
        batch = next(batch for batch in batches(setting.company, len(requests)) if index in batch)
        if setting.warm:
            serve(engine, requests, batch)
        found = OpTrace(engine, str(index), keep)
        serve(engine, requests, batch[::-1] if setting.warm else batch)
    return found


def first_difference(one: OpTrace, other: OpTrace) -> Departure | None:
    """The first tensor of both that differs, in the order of positions and of calls."""
    for position in sorted(one.digests.keys() & other.digests.keys()):
        for ours in one.digests[position]:
            for theirs in other.digests[position]:
                before = None
                for seen, digest in ours.items():
                    if seen not in theirs:
                        continue
                    if theirs[seen] != digest:
                        return Departure(position, seen, before)
                    before = seen.call if seen.is_result else before
    return None


def locate(
    one: Setting, other: Setting, requests: Sequence[Request], index: int, make_engine: MakeEngine
) -> Departure | None:
    """Where the request of ``index`` is computed otherwise in the two settings; None if it is not, this time."""
    found = first_difference(*(trace(setting, requests, index, make_engine) for setting in (one, other)))
    if found is None:
        return None
    plain = [dataclasses.replace(setting, compiled=False) for setting in (one, other)]
    uncompiled = [trace(setting, requests, index, make_engine) for setting in dict.fromkeys(plain)]
    between = () if found.seen.is_result else _calls_between(uncompiled[0], found)
    only_compiled = None
    if one.compiled and other.compiled:
        only_compiled = len(uncompiled) == 1 or first_difference(*uncompiled) is None
    kept = [trace(setting, requests, index, make_engine, (found.position, found.seen)).kept for setting in (one, other)]
    return dataclasses.replace(
        found, between=between, only_compiled=only_compiled, difference=_described(*(rows[0] for rows in kept))
    )


def _calls_between(uncompiled: OpTrace, found: Departure) -> tuple[str, ...]:
    """Names of the ops that an uncompiled step calls between the two calls of a departure."""
    calls = list(dict.fromkeys(seen.call for seen in uncompiled.digests[found.position][0]))
    if found.seen.call not in calls or (found.before is not None and found.before not in calls):
        return ()
    start = calls.index(found.before) + 1 if found.before is not None else 0
    return tuple(call.op for call in calls[start : calls.index(found.seen.call)])


def _described(one: Tensor, other: Tensor) -> str:
    """How two rows differ."""
    distance = (one.double() - other.double()).abs()
    count, largest = int((one != other).sum()), float(distance.max())
    at = int(distance.flatten().argmax())
    values = " and ".join(f"{row.flatten()[at].item():.9g}" for row in (one, other))
    if count == 0 or not math.isfinite(largest):
        return f"{one.numel()} elements of other bits"
    return f"{count} of {one.numel()} elements differ, the most by {largest:.3g} ({values})"
