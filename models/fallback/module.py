"""transformers' module of a model, on the device "meta", with places of this engine's own for its linear layers."""

import copy
import dataclasses
import json
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.models.fallback.attention import ATTENTION, Unsupported, register
from compiled_llm.models.fallback.experts import ExpertsName, RecordedExperts, experts_names, is_experts
from compiled_llm.models.fallback.stored_names import StoredNames
from compiled_llm.ops.library import define_op

# Ops that stand in a recorded graph, and are never run.
define_op(
    "recorded_linear(Tensor x, int index, int out_features) -> Tensor",
    fake=lambda x, index, out_features: x.new_empty((*x.shape[:-1], out_features)),
)
define_op(
    "recorded_embedding(Tensor ids, int hidden_size, ScalarType dtype) -> Tensor",
    fake=lambda ids, hidden_size, dtype: ids.new_empty((*ids.shape, hidden_size), dtype=dtype),
)

HEAD = -1
"""The number of the head, where linear layers have numbers."""


class _Weight(NamedTuple):
    """What code may ask of a weight that is kept elsewhere; all else is refused, as it has no such attribute."""

    dtype: torch.dtype
    device: torch.device = torch.device("meta")


class _Linear(nn.Module):
    """In the place of an ``nn.Linear``."""

    def __init__(self, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.index, self.out_features, self.in_features = index, linear.out_features, linear.in_features
        self.weight = _Weight(linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.compiled_llm.recorded_linear(x, self.index, self.out_features)


class _Embedding(nn.Module):
    """In the place of the embedding of token ids."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding_dim = embedding.embedding_dim
        self.weight = _Weight(embedding.weight.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.ops.compiled_llm.recorded_embedding(ids, self.embedding_dim, self.weight.dtype)


class LinearName(NamedTuple):
    """An ``nn.Linear`` of the module."""

    name: str
    out_features: int
    in_features: int
    bias: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Module:
    """A model's module, and what it was made of.

    Attributes:
        model: the whole, with a head. Linear layers, experts and embedding are replaced; its buffers are on "meta".
        linears: linear layers, also of experts, that were replaced, in the order of their numbers; the head left out.
        head, embedding: the same of those two.
        is_own_embedding: whether the embedding was replaced: one that does more than look up is not.
        is_tied: whether the two are one tensor.
        body_path: where in ``model`` the part below the head is.
        stored: name -> that in a checkpoint, of all parameters but those of experts.
        parameters: name -> parameter of what was not replaced, and buffers that checkpoints hold.
        buffers: name -> content of the others, which follow from the config.
    """

    model: Any
    linears: tuple[LinearName | ExpertsName, ...]
    head: LinearName
    embedding: LinearName
    is_own_embedding: bool
    is_tied: bool
    body_path: str
    stored: dict[str, str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def make_module(fields: str, dtype: torch.dtype) -> Module:
    """The module of ``TransformersConfig.fields`` in ``dtype``."""
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    register()
    config = json.loads(fields)
    full = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    full.return_dict = True  # how ``Body`` and ``Head`` are given what it returns
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(full)]
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise Unsupported("attention of its own, which is not registered with AttentionInterface")
    if model_class._is_stateful:
        raise Unsupported("state that is not keys and values")
    with init_empty_weights(include_buffers=False), torch.device("cpu"):
        model = model_class._from_config(full, dtype=dtype, attn_implementation=ATTENTION)
    _keep_in_float32(model, dtype)
    model.tie_weights()
    model.eval()
    return _with_places(model)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """As transformers does when it loads a model: some parameters stay in float32."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, value in _tensors(model):
        if any(f".{part}." in f".{name}." for part in kept):
            value.data = value.data.float()


def _with_places(model: Any) -> Module:
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise Unsupported(f"a head of {type(head).__name__} over an embedding of {type(embedding).__name__}")
    is_tied = head.weight is embedding.weight
    if is_tied and head.bias is not None:
        raise Unsupported("a tied head with a bias")
    head_name = _name_of(names[id(head)], head)
    embedding_name = LinearName(
        names[id(embedding)], embedding.num_embeddings, embedding.embedding_dim, False, embedding.weight.dtype
    )
    is_own = type(embedding) is nn.Embedding
    if is_own:
        model.set_submodule(names[id(embedding)], _Embedding(embedding))
    stored, linears = StoredNames(model), list[LinearName | ExpertsName]()
    for name, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(name, RecordedExperts(module, len(linears)))
            linears += experts_names(name, module, stored)
        elif type(module) is nn.Linear:
            index = HEAD if module is head else len(linears)
            model.set_submodule(name, _Linear(index, module))
            if module is not head:
                linears.append(_name_of(name, module))
    kept = model.state_dict(keep_vars=True).keys()
    parameters = {name: value for name, value in _tensors(model) if name in kept}
    buffers = {name: value for name, value in _tensors(model) if name not in kept}
    strange = [name for name, value in parameters.items() if not value.is_floating_point()]
    if strange:
        raise Unsupported(f"parameters that are no floating-point numbers: {', '.join(strange)}")
    if len({id(value) for value in parameters.values()}) < len(parameters):
        raise Unsupported("parameters that are tied to each other")
    for name, value in [*model.named_buffers()]:
        path, _, own = name.rpartition(".")
        model.get_submodule(path)._buffers[own] = value.to("meta")
    plain = [linear for linear in (*linears, embedding_name, head_name) if isinstance(linear, LinearName)]
    weights = [f"{linear.name}.{kind}" for linear in plain for kind in ("weight", "bias")]
    return Module(
        model=model,
        linears=tuple(linears),
        head=head_name,
        embedding=embedding_name,
        is_own_embedding=is_own,
        is_tied=is_tied,
        body_path=names[id(model.get_decoder())],
        stored={name: stored.of(name) for name in (*parameters, *weights)},
        parameters=parameters,
        buffers=buffers,
    )


def _tensors(model: Any) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _name_of(name: str, linear: nn.Linear) -> LinearName:
    return LinearName(name, linear.out_features, linear.in_features, linear.bias is not None, linear.weight.dtype)


class Body(nn.Module):
    """The part of a model below its head: (input ids ``[T]``, positions ``[T]``) -> ``[T, D]``."""

    def __init__(self, model: Any, recorder: Any) -> None:
        super().__init__()
        self.model, self._recorder = model.get_decoder(), recorder

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        ids = input_ids[None].long()
        out = self.model(
            input_ids=ids,
            position_ids=positions[None].long(),
            attention_mask=torch.ones_like(ids, dtype=torch.bool),  # none is padding
            use_cache=False,
            **{ATTENTION: self._recorder},
        )
        return out.last_hidden_state[0]


class _Given(nn.Module):
    """In the place of a body: gives what it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        out: Any = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
        out.router_logits = None
        return out


class Head(nn.Module):
    """What a model makes of its body's output: rows ``[R, D]`` -> logits ``[R, V]``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        path = next(name for name, module in model.named_modules() if module is model.get_decoder())
        self.model = _with_submodule(model, path.split("."), _Given())

    def forward(self, rows: Tensor) -> Tensor:
        return self.model(inputs_embeds=rows[None], use_cache=False).logits[0]


def _with_submodule(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """``module`` with another one at ``path``; all else is shared with the old one."""
    if not path:
        return new
    own = copy.copy(module)
    child = _with_submodule(module.get_submodule(path[0]), path[1:], new)
    own.__dict__["_modules"] = {**module._modules, path[0]: child}
    return own
