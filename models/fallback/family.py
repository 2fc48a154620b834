"""The family of a model without a file of its own: what was recorded of transformers' modelling code."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.fallback.experts import ExpertsName
from compiled_llm.models.fallback.module import LinearName
from compiled_llm.models.fallback.recording import Calls, Recording, recorded
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.mixture import UsedExperts
from compiled_llm.models.linears.protocol import GroupedLinear, Linear, StoredLinear
from compiled_llm.models.weights import Source


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[tuple[Linear | GroupedLinear, ...], ...]  # of each decoder layer; in a last one, others
    head: Linear  # [V, D]
    others: tuple[Tensor, ...]  # parameters that are no matrix of a linear layer, in their order in the module
    used: UsedExperts
    ropes: tuple[Tensor, ...]  # what follows from the config: rotary frequencies, constants of the code


def family_of_recording(config: TransformersConfig) -> Family[TransformersConfig, Weights]:
    """The family of this one model."""
    model = _model(config.architecture, config.fields, config.dtype)
    derived = ("rotary_emb.inv_freq", *model.recording.module.buffers)
    return Family("", TransformersConfig, model.take, model.layers, model.forward, model.head, derived_tensors=derived)


@functools.lru_cache(maxsize=8)
def _model(architecture: str, fields: str, dtype: str) -> "_RecordedModel":
    return _RecordedModel(architecture, fields, dtype)


class _RecordedModel:
    """What a family does, for one model. Pickled as what it was recorded from: it is part of compiled functions."""

    def __init__(self, architecture: str, fields: str, dtype: str) -> None:
        self._made_of = architecture, fields, dtype
        self.recording = recorded(architecture, fields, getattr(torch, dtype))
        self._groups = _by_layer(self.recording.module.linears)
        order = list(itertools.chain(*self._groups))
        self._places = [order.index(index) for index in range(len(order))]  # number of a linear layer -> where it is
        names = [*_others(self.recording), *_constants(self.recording)]
        if not self.recording.module.is_own_embedding:
            names.append(_weight_of(self.recording.module.embedding))
        self._body_places = [names.index(name) for name in self.recording.body_tensors]
        self._head_places = [names.index(name) for name in self.recording.head_tensors]

    def __reduce__(self) -> tuple[Any, ...]:
        return _model, self._made_of

    def __repr__(self) -> str:
        return f"_RecordedModel{self._made_of}"

    def take(self, config: TransformersConfig, source: Source) -> Weights:
        return _take(self.recording, self._groups, source)

    def layers(self, config: TransformersConfig) -> Layers:
        return self.recording.layers

    def forward(
        self,
        weights: Weights,
        step: StepInput,
        kv_cache: KVCache,
        config: TransformersConfig,
        layers: Layers,
    ) -> Tensor:
        """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
        flat = [linear for group in weights.layers for linear in group]
        linears, given = tuple(flat[place] for place in self._places), _tensors(weights)
        calls = Calls(
            linears,
            weights.head,
            weights.embedding,
            step.positions.device,
            step,
            kv_cache,
            layers,
            weights.used.total,
        )
        tensors = [given[place] for place in self._body_places]
        return self.recording.body(None, calls, *tensors, step.input_ids, step.positions)

    def head(self, weights: Weights, rows: Tensor, config: TransformersConfig) -> Tensor:
        """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
        given = _tensors(weights)
        calls = Calls((), weights.head, weights.embedding, rows.device)
        return self.recording.head(None, calls, *(given[place] for place in self._head_places), rows)


def _tensors(weights: Weights) -> tuple[Tensor, ...]:
    """Parameters, what follows from the config, and the embedding, if its parameter is one that the code reads."""
    table = (weights.embedding.weight,) if isinstance(weights.embedding, Dense) else ()
    return (*weights.others, *weights.ropes, *table)


def _others(recording: Recording) -> list[str]:
    """Names of the parameters that are taken one by one."""
    embedding = _weight_of(recording.module.embedding)
    return [name for name in recording.module.parameters if name != embedding]


def _constants(recording: Recording) -> dict[str, Tensor]:
    return recording.module.buffers | recording.constants


def _weight_of(linear: LinearName) -> str:
    return f"{linear.name}.weight"


def _by_layer(linears: tuple[LinearName | ExpertsName, ...]) -> list[list[int]]:
    """Numbers of the linear layers of each decoder layer, by the first number in their names; last, of the others."""
    groups: dict[float, list[int]] = {}
    for index, linear in enumerate(linears):
        number = re.search(r"\.(\d+)\.", linear.name)
        groups.setdefault(int(number[1]) if number else float("inf"), []).append(index)
    return [groups[number] for number in sorted(groups)]


def _take(recording: Recording, groups: list[list[int]], source: Source) -> Weights:
    module = recording.module
    embedding, head = _take_embedding_and_head(recording, source)
    layers = tuple(tuple(_take_linear(recording, index, source) for index in group) for group in groups)
    for own, name in module.stored.items():
        if own != name:
            source.may_be_called(name, own)
    others = []
    for name in _others(recording):
        like = module.parameters[name]
        others.append(
            source.tensor(
                module.stored[name],
                tuple(like.shape),
                mean=1.0 if like.dim() == 1 and name.endswith(".weight") else 0.0,  # of norms
                dtype=None if like.dtype == recording.dtype else like.dtype,
            )
        )
    constants = tuple(tensor.to(source.device) for tensor in _constants(recording).values())
    return Weights(embedding, layers, head, tuple(others), source.used_experts(), constants)


def _take_linear(recording: Recording, index: int, source: Source) -> Linear | GroupedLinear:
    name = recording.module.linears[index]
    if isinstance(name, LinearName):
        return source.linear(_part(recording, name), dtype=name.dtype)
    if not name.parts:
        source.may_be_called(name.stored, name.name)
        of_all = name.num_experts, name.out_features, name.in_features, recording.top_k[index]
        return source.stacked_experts(name.stored, *of_all, transposed=False, bias=False)
    each = [[part.replace("*", str(expert)) for part in name.parts] for expert in range(name.num_experts)]
    parts = [[StoredLinear(part, name.out_features, name.in_features) for part in one] for one in each]
    return source.experts(parts, recording.top_k[index], name.name)


def _take_embedding_and_head(recording: Recording, source: Source) -> tuple[Linear, Linear]:
    module = recording.module
    embedding, head = _part(recording, module.embedding), _part(recording, module.head)
    if module.is_own_embedding and module.is_tied:
        return source.embedding_and_head(embedding.name, head.name, *embedding[1:3], tied=True)
    table = source.table(embedding) if module.is_own_embedding else Dense.take(source, [embedding])
    if not module.is_tied:
        return table, source.linear(head._replace(role="head"))
    source.may_repeat[f"{head.name}.weight"] = f"{embedding.name}.weight"
    return table, table


def _part(recording: Recording, linear: LinearName) -> StoredLinear:
    """A linear layer by its name in a checkpoint."""
    stored = recording.module.stored[_weight_of(linear)].removesuffix(".weight")
    return StoredLinear(stored, linear.out_features, linear.in_features, linear.bias)
