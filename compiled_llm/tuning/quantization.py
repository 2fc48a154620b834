"""What the products of a step take on this CPU with weights of each kind, beside the model's dtype.

For each kind the model's linear layers are made with constants in the place of weights, so no checkpoint is read: all
of a small model; of a large one the same share of each size, at least one, with more bytes than caches hold. They run
one after the other, as in a step, in turns with those of the model's dtype. In each round a layer's time is the median
of those of its size; of the rounds the fastest tenth counts. Ratios of a step are those of the sums over its layers.

What is found is printed as engine arguments. An engine never measures and chooses by itself: its tokens would depend on
what else the machine did at its start.
"""

import dataclasses
import itertools
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api import tables
from compiled_llm.api.config import QUANTIZATIONS, EngineConfig
from compiled_llm.checkpoint.model_files import checkpoint_directory, model_config
from compiled_llm.checkpoint.quantization import linears_of, plain_kind
from compiled_llm.models.linears.protocol import AroundKind, GroupedLinear, Linear, LinearKind, StoredLinear, Take
from compiled_llm.models.linears.quantizing import names
from compiled_llm.models.registry import family_of
from compiled_llm.ops import native
from compiled_llm.ops.linear.compressed_linear import END, CompressedWeight

SLOWER = 0.97  # ratio of speeds from which on a product counts as equally fast: nothing is measured more exactly
CYCLE_BYTES = 256 << 20  # of weights that are read in turn: more than a processor's caches hold
LEAST_ROUNDS = 5
MANY_ROWS, FEW_COPIES = 64, 4  # where memory no longer counts, so many layers of a size are enough
Inputs = Mapping[tuple[int, torch.dtype], Tensor]
"""in_features, dtype -> ``[rows, in_features]``"""
Rounds = list[tuple[list[float], list[float]]]
"""Of each round: what a layer of each group takes in the model's dtype, and in the kind."""
_WITH_INT8 = "checkpoint, int8 activations"
_ARGUMENTS = (
    *("quantization", "quantization_group_size", "quantization_head", "quantization_embedding"),
    *("quantization_activations", "quantization_skip"),
)
_CONSTANT = 0x35  # of codes: a usual number in each kind


class Step(NamedTuple):
    """``rows`` that a step computes, and of them those that it has logits of."""

    name: str
    rows: int
    logits_rows: int


class Layer(NamedTuple):
    """A linear layer without contents, what the checkpoint calls its parts, and the dtype of its inputs."""

    parts: tuple[StoredLinear, ...]
    linear: Linear
    dtype: torch.dtype

    @property
    def is_head(self) -> bool:
        return self.parts[0].role == "head"


@dataclasses.dataclass(frozen=True)
class Noting(AroundKind):
    """The kind ``plain``, which notes the layers that compute products.

    Attributes:
        layers: those of a step, in its order. Embeddings, and layers of single heads, which nothing rounds, are left.
        expert_bytes: of experts' layers, which are left too.
        expert_parts: what the checkpoint calls these.
    """

    plain: LinearKind
    layers: list[Layer] = dataclasses.field(default_factory=list)
    expert_bytes: list[int] = dataclasses.field(default_factory=list)
    expert_parts: list[StoredLinear] = dataclasses.field(default_factory=list)

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        self.layers.append(Layer(tuple(parts), self.plain.take(take, parts), take.dtype))
        return self.layers[-1].linear

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return self.plain.take_table(take, part)

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        made = self.plain.take_experts(take, experts, top_k)
        self.expert_bytes.append(made.nbytes)
        self.expert_parts.extend(itertools.chain.from_iterable(experts))
        return made

    def take_heads(self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int) -> Any:
        return self.plain.take_heads(take, parts, num_heads, first)


class Group(NamedTuple):
    """Layers that are alike in the model's dtype and in a kind.

    Attributes:
        places: where they stand among the model's.
    """

    places: tuple[int, ...]
    plain: Layer
    quantised: Layer

    @property
    def is_rounded(self) -> bool:
        return signature(self.plain.linear) != signature(self.quantised.linear)


class Measured(NamedTuple):
    """The layers of a group.

    Attributes:
        seconds, plain_seconds: of one of them in the kind, and in the model's dtype; by the step's name.
        ratios: how many times as fast the first is.
    """

    group: Group
    seconds: dict[str, float]
    plain_seconds: dict[str, float]
    ratios: dict[str, float]

    @property
    def nbytes(self) -> int:
        """Of all its layers, quantised."""
        return len(self.group.places) * self.group.quantised.linear.nbytes

    @property
    def is_slower(self) -> bool:
        """At some number of rows."""
        return self.group.is_rounded and min(self.ratios.values()) < SLOWER


class Found(NamedTuple):
    """What a kind takes.

    Attributes:
        config: the engine's arguments that choose it.
        nbytes, plain_nbytes: of the weights that all products read.
        ratios: how many times as fast all products of a step are.
        rounds: that were measured of each step.
        skip: patterns of ``quantization_skip`` for the layers that are slower at some number of rows; None: they cannot
            be left, since all that the kind rounds are slower, or the checkpoint has them in it.
        skip_ratios: ``ratios`` with these layers left in the model's dtype.
    """

    config: EngineConfig
    nbytes: int
    plain_nbytes: int
    layers: list[Measured]
    rounds: dict[str, int]
    ratios: dict[str, float]
    skip: tuple[str, ...] | None
    skip_ratios: dict[str, float]

    @property
    def is_never_slower(self) -> bool:
        return min(self.ratios.values()) >= SLOWER

    def arguments(self, skip: Sequence[str] = ()) -> dict[str, Any]:
        """The engine's arguments that choose the kind, with these layers left besides."""
        given = {name: getattr(self.config, name) for name in _ARGUMENTS}
        given["quantization_skip"] = tuple(dict.fromkeys((*self.config.quantization_skip, *skip)))
        return {name: value for name, value in given.items() if value != getattr(EngineConfig(), name)}


class Result(NamedTuple):
    """``expert_bytes``: of experts' layers in the model's dtype, which were not measured."""

    dtype: str
    kernels: str
    found: dict[str, Found]
    expert_bytes: int

    @property
    def fastest(self) -> str | None:
        """The kind with the largest geometric mean of ratios among those that are never slower; None: there is none."""
        never = {name: one for name, one in self.found.items() if one.is_never_slower}
        return max(never, key=lambda name: math.prod(never[name].ratios.values()), default=None)


def tune(
    config: EngineConfig,
    kinds: Mapping[str, EngineConfig],
    rows: Sequence[int],
    prompt_tokens: int,
    seconds: float,
) -> Result:
    """Measure each kind for the model of ``config``.

    Args:
        config: the model as it is.
        kinds: by their names, the same with its weights rounded. Empty: all kinds, or what a quantised checkpoint has.
        rows: of steps that decode, a row for each request.
        prompt_tokens: of a step that computes so much of a prompt, and logits of one row; 0: no such step.
        seconds: for all together; each kind and step has ``LEAST_ROUNDS`` in any case.

    Raises:
        ValueError: the model cannot be served on a CPU with these arguments, or it is quantised already and ``kinds``
            are given.
    """
    made = model_config(checkpoint_directory(config, with_weights=False), config.model_impl, config.dtype)
    device, dtype = torch.device("cpu"), getattr(torch, made.dtype if config.dtype == "auto" else config.dtype)
    family = family_of(made)

    def noted(kind: LinearKind) -> Noting:
        noting = Noting(kind)
        family.describe(made, dtype, noting)
        return noting

    if made.published and kinds:
        raise ValueError(
            "quantization and the arguments that belong to it must be left out for a checkpoint that is quantised "
            f"already, given {', '.join(kinds)}: it is measured as it is, and with activations in int8"
        )
    chosen = kinds or (published_kinds(config) if made.published else all_kinds(config))
    plain = noted(plain_kind(config, made, device, dtype))
    steps = [Step(f"{count} row{'s' if count > 1 else ''}", count, count) for count in rows]
    if prompt_tokens:
        steps.append(Step(f"prompt of {prompt_tokens}", prompt_tokens, 1))
    layers: dict[str, list[Layer]] = {}
    for name, of_kind in chosen.items():
        try:
            layers[name] = noted(linears_of(of_kind, made, device, dtype)).layers
        except ValueError:
            if name != _WITH_INT8:
                raise  # else nothing of the checkpoint could have such activations
    each = seconds / len(layers)
    found = {name: measure(chosen[name], plain, quantised, steps, each) for name, quantised in layers.items()}
    kernels = native.load("linear_cpu")
    isa = kernels.supported_isas()[0] if kernels else "plain torch"
    return Result(str(dtype)[6:], isa, found, sum(plain.expert_bytes))


def all_kinds(config: EngineConfig) -> dict[str, EngineConfig]:
    return {kind: dataclasses.replace(config, quantization=kind) for kind in QUANTIZATIONS}


def published_kinds(config: EngineConfig) -> dict[str, EngineConfig]:
    """Of a quantised checkpoint: as it is, and with activations in int8."""
    chosen = {"checkpoint": "model", _WITH_INT8: "int8"}
    return {name: dataclasses.replace(config, quantization_activations=how) for name, how in chosen.items()}


def signature(linear: Any) -> Any:
    """What decides how a layer is computed: its tensors' shapes and dtypes, its numbers."""
    if isinstance(linear, Tensor):
        return tuple(linear.shape), str(linear.dtype)
    if isinstance(linear, tuple):
        return type(linear).__name__, *map(signature, linear)
    return linear


def groups_of(plain: Sequence[Layer], quantised: Sequence[Layer]) -> list[Group]:
    """Layers that are alike, in the order in which the first of each stands."""
    assert [label(layer) for layer in plain] == [label(layer) for layer in quantised]
    alike: dict[Any, list[int]] = {}
    for place, (one, other) in enumerate(zip(plain, quantised, strict=True)):
        key = signature(one.linear), signature(other.linear), one.is_head
        alike.setdefault(key, []).append(place)
    return [Group(tuple(places), plain[places[0]], quantised[places[0]]) for places in alike.values()]


def with_contents(linear: Any) -> Any:
    """The layer with constants in its tensors, which lie where an engine has them."""
    if isinstance(linear, CompressedWeight):
        words, tables, exceptions = (native.zeros_on(torch.device("cpu"), t.shape, t.dtype) for t in linear)
        return CompressedWeight(words.fill_(_CONSTANT), tables.fill_(_CONSTANT), exceptions.fill_(END))
    if isinstance(linear, tuple):
        fields = list(map(with_contents, linear))
        return type(linear)(*fields) if hasattr(linear, "_fields") else tuple(fields)
    if not isinstance(linear, Tensor):
        return linear
    made = native.zeros_on(torch.device("cpu"), linear.shape, linear.dtype)
    if linear.dtype == torch.int32:  # an order of inputs
        return made
    return made.fill_(0.01) if linear.is_floating_point() else made.fill_(_CONSTANT)


class Cycle:
    """Layers of all groups: of each the share with which all fit into ``CYCLE_BYTES``, but at least one."""

    def __init__(self, counts: Sequence[int], layers: Sequence[Layer]) -> None:
        nbytes = sum(count * layer.linear.nbytes for count, layer in zip(counts, layers, strict=True))
        share = min(1.0, CYCLE_BYTES / max(1, nbytes))
        made = [
            (layer, [with_contents(layer.linear) for _ in range(max(1, int(share * count)))])
            for count, layer in zip(counts, layers, strict=True)
        ]
        # As in a model: one of each group after the other, the head at the end.
        self._order: list[tuple[int, Layer, Linear]] = []
        for number in range(max(len(copies) for _, copies in made)):
            self._order += [
                (place, layer, copies[number])
                for place, (layer, copies) in enumerate(made)
                if number < len(copies) and not layer.is_head
            ]
        self._order += [(place, layer, copies[0]) for place, (layer, copies) in enumerate(made) if layer.is_head]
        self._groups = len(layers)

    def seconds(self, step: Step, inputs: Inputs) -> list[float]:
        """Of one layer a group: the median of those that ran, of many rows the least. ``inputs``: of each size."""
        times: list[list[float]] = [[] for _ in range(self._groups)]
        most = FEW_COPIES if step.rows > MANY_ROWS else sys.maxsize
        for place, layer, linear in self._order:
            if len(times[place]) == most:
                continue
            x = inputs[linear.in_features, layer.dtype]
            x = x[: step.logits_rows] if layer.is_head else x
            start = time.perf_counter()
            linear.apply(x)
            times[place].append(time.perf_counter() - start)
        return list(map(min if step.rows > MANY_ROWS else statistics.median, times))


def measure(
    config: EngineConfig, noted: Noting, quantised: Sequence[Layer], steps: Sequence[Step], seconds: float
) -> Found:
    """What a kind takes beside the model's dtype.

    Args:
        config: the arguments for the kind.
        noted, quantised: the model's layers in its dtype, and in the kind.
    """
    plain = noted.layers
    groups = groups_of(plain, quantised)
    counts = [len(group.places) for group in groups]
    cycles = Cycle(counts, [group.plain for group in groups]), Cycle(counts, [group.quantised for group in groups])
    generator = torch.Generator().manual_seed(0)
    times: dict[str, Rounds] = {}
    for step in steps:
        inputs = {
            (size, dtype): torch.randn(step.rows, size, generator=generator).to(dtype)
            for size, dtype in dict.fromkeys((layer.linear.in_features, layer.dtype) for layer in plain)
        }
        times[step.name] = in_turns(cycles, step, inputs, seconds / len(steps))
    layers = [layer_of(group, place, times) for place, group in enumerate(groups)]
    changed = [one for one in layers if one.group.is_rounded]
    kept = [one for one in changed if one.is_slower]
    can_be_left = config.quantization is not None and (not kept or len(kept) < len(changed))
    skip = skip_patterns(kept, changed, noted) if can_be_left else None
    return Found(
        config,
        sum(layer.linear.nbytes for layer in quantised),
        sum(layer.linear.nbytes for layer in plain),
        layers,
        {name: len(rounds) for name, rounds in times.items()},
        step_ratios(layers),
        skip,
        step_ratios(layers, kept),
    )


def in_turns(cycles: tuple[Cycle, Cycle], step: Step, inputs: Inputs, seconds: float) -> Rounds:
    rounds: Rounds = []
    end = time.perf_counter() + seconds
    with torch.inference_mode():
        for cycle in cycles:  # memory that is touched, kernels that are built
            cycle.seconds(step, inputs)
        while len(rounds) < LEAST_ROUNDS or time.perf_counter() < end:
            order = (0, 1) if len(rounds) % 2 == 0 else (1, 0)
            of = {which: cycles[which].seconds(step, inputs) for which in order}
            rounds.append((of[0], of[1]))
    return rounds


def layer_of(group: Group, place: int, times: Mapping[str, Rounds]) -> Measured:
    plain = {step: _usual([plain[place] for plain, _ in rounds]) for step, rounds in times.items()}
    kind = {step: _usual([kind[place] for _, kind in rounds]) for step, rounds in times.items()}
    return Measured(group, kind, plain, {step: plain[step] / kind[step] for step in times})


def _usual(seconds: list[float]) -> float:
    """The lowest tenth of the rounds ends there: what other processes cost is above it."""
    return sorted(seconds)[len(seconds) // 10]


def step_ratios(layers: Sequence[Measured], left: Sequence[Measured] = ()) -> dict[str, float]:
    """Of the products of each step, the layers of ``left`` being in the model's dtype."""

    plain, kind = dict.fromkeys(layers[0].seconds, 0.0), dict.fromkeys(layers[0].seconds, 0.0)
    for one in layers:
        taken = one.seconds if one.group.is_rounded and one not in left else one.plain_seconds
        for step, seconds in taken.items():
            kind[step] += len(one.group.places) * seconds
            plain[step] += len(one.group.places) * one.plain_seconds[step]
    return {step: plain[step] / kind[step] for step in plain}


def skip_patterns(kept: Sequence[Measured], changed: Sequence[Measured], noted: Noting) -> tuple[str, ...]:
    """The fewest words of names that ``quantization_skip`` matches with all parts of ``kept`` and no other rounded one.

    Args:
        changed: all that the kind rounds, ``kept`` among them. What it leaves anyway, a pattern may match as well.
    """
    layers = noted.layers
    places = {place for one in kept for place in one.group.places}
    wanted = [part for place in places for part in layers[place].parts]
    others = list(noted.expert_parts)
    for place in {place for one in changed for place in one.group.places} - places:
        others += layers[place].parts
    patterns: dict[str, None] = {}
    for place in sorted(places):
        for part in layers[place].parts:
            if any(names(pattern, part) for pattern in patterns):
                continue
            words = re.sub(r"\b\d+\b", "*", part.name).split(".")
            ends = [".".join(words[-count:]) for count in range(1, len(words) + 1)]
            fits = (end for end in ends if end[0] != "*" and not any(names(end, other) for other in others))
            patterns[next(fits, part.name)] = None
    assert all(any(names(pattern, part) for pattern in patterns) for part in wanted)
    return tuple(patterns)


# ---- the result -----------------------------------------------------------------------------------------------------


def text_of(result: Result) -> str:
    """For people."""
    mib = 2**20
    lines = [
        f"Products of a step, kernels {result.kernels}: how many times as fast as in {result.dtype}, with weights of "
        "each kind",
        "",
    ]
    rows: list[dict[str, Any]] = []
    for name, one in result.found.items():
        size = {"weights": name, "MiB": one.nbytes / mib, f"MiB {result.dtype}": one.plain_nbytes / mib}
        rows.append(size | rounded(one.ratios) | {"never slower": "yes" if one.is_never_slower else "no"})
    lines.append(tables.text_table(rows))
    of_layers = [row for name, one in result.found.items() for row in layer_rows(name, one)]
    if of_layers:
        lines += ["", "One layer of each size:", "", tables.text_table(of_layers)]
    if result.expert_bytes:
        experts = f"{result.expert_bytes / mib:,.1f} MiB in {result.dtype}"
        lines += ["", f"Not measured, and in no figure or advice here: layers of experts, {experts}"]
    for name, one in result.found.items():
        lines += ["", *advice(name, one, result.dtype)] if any(layer.is_slower for layer in one.layers) else []
    return "\n".join([*lines, "", *(verdict(result) if of_layers else ["None of the layers here is quantised"])])


def verdict(result: Result) -> list[str]:
    """The last lines: which kind to take."""
    at_load = all(one.config.quantization is not None for one in result.found.values())
    slower = "Each of these is slower at some number of rows"
    if result.fastest is not None:
        said = f"The fastest of those that are never slower here: {flags(result.found[result.fastest].arguments())}"
    elif at_load:
        left = ", or leave layers as above" if any(one.skip for one in result.found.values()) else ""
        said = f"{slower}: keep {result.dtype}{left}"
    else:
        said = f"{slower}: load the model before it was quantised, in {result.dtype}"
    return [said, "`compiled-llm report weights` says what a kind costs in quality"] if at_load else [said]


def layer_rows(name: str, found: Found) -> list[dict[str, Any]]:
    """Of a layer of each group: its size, and how many times as fast it is."""
    return [
        {
            "weights": name,
            "layer": label(one.group.plain),
            "size": f"{one.group.plain.linear.out_features}x{one.group.plain.linear.in_features}",
            "count": len(one.group.places),
        }
        | rounded(one.ratios)
        | {"slower": "slower" if one.is_slower else ""}
        for one in found.layers
        if one.group.is_rounded
    ]


def rounded(ratios: Mapping[str, float]) -> dict[str, float]:
    return {step: round(ratio, 3) for step, ratio in ratios.items()}


def label(layer: Layer) -> str:
    """The last words of the names of its parts."""
    said = ",".join(dict.fromkeys(part.name.rpartition(".")[2] for part in layer.parts))
    return f"{said} (head)" if layer.parts[0].also else said  # a tied one has the embedding's name


def advice(name: str, found: Found, dtype: str) -> list[str]:
    """What to do about layers that are slower."""
    slower = sum(one.nbytes for one in found.layers if one.is_slower) / max(1, sum(one.nbytes for one in found.layers))
    said = f"{name}: layers with {slower:.0%} of the bytes are slower than in {dtype} at some number of rows"
    if found.config.quantization is None:
        return [f"{said}. To have these in {dtype}, load the model before it was quantised"]
    if found.skip is None:
        return [f"{said}, which are all that it rounds"]
    ratios = ", ".join(f"{ratio:.2f} ({step})" for step, ratio in found.skip_ratios.items())
    return [f"{said}. With these left: {ratios}", f"    {flags(found.arguments(found.skip))}"]


def flags(arguments: Mapping[str, Any]) -> str:
    """Engine arguments on the command line."""
    return " ".join(
        f"--{name.replace('_', '-')} {shlex.quote(str(one))}"
        for name, value in arguments.items()
        for one in (value if isinstance(value, tuple) else (value,))
    )


def as_json(result: Result) -> dict[str, Any]:
    def layer(one: Measured) -> dict[str, Any]:
        linear = one.group.plain.linear
        return {
            "layers": list(dict.fromkeys(part.name for part in one.group.plain.parts)),
            "outputs": linear.out_features,
            "inputs": linear.in_features,
            "count": len(one.group.places),
            "rounded": one.group.is_rounded,
            "nbytes": one.group.quantised.linear.nbytes,
            "seconds": one.seconds,
            "plain_seconds": one.plain_seconds,
            "ratios": rounded(one.ratios),
            "slower": one.is_slower,
        }

    def kind(one: Found) -> dict[str, Any]:
        return {
            "arguments": one.arguments(),
            "nbytes": one.nbytes,
            "plain_nbytes": one.plain_nbytes,
            "ratios": rounded(one.ratios),
            "rounds": one.rounds,
            "never_slower": one.is_never_slower,
            "arguments_never_slower": None if one.skip is None else one.arguments(one.skip),
            "ratios_never_slower": None if one.skip is None else rounded(one.skip_ratios),
            "layers": [layer(each) for each in one.layers],
        }

    return {
        "dtype": result.dtype,
        "kernels": result.kernels,
        "fastest": result.fastest,
        "expert_nbytes": result.expert_bytes,
        "kinds": {name: kind(one) for name, one in result.found.items()},
    }
