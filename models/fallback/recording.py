"""transformers' modelling code of a model, run once on tensors without data and recorded as a graph of torch's ops.

``torch.export`` records what the code calls, for any number of tokens. Attention, linear layers and the embedding stand
in the graph as calls of this engine's own, which know weights and KV cache. So what a step runs is a pure function of
tensors, as that of a family with a file is, and has no graph breaks: code whose way depends on the content of a tensor,
or on the number of tokens, cannot be recorded, and is refused with its place.
"""

import dataclasses
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from compiled_llm.models.fallback.attention import AttentionRecorder, Unsupported
from compiled_llm.models.fallback.experts import RecordedExperts
from compiled_llm.models.fallback.module import HEAD, Body, Head, Module, make_module
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, attend
from compiled_llm.models.linears.adapted import experts_of
from compiled_llm.models.linears.protocol import GroupedLinear, Linear
from compiled_llm.ops import expert_rows
from compiled_llm.ops.torch_private import recorded_checks

_MOST_TOKENS = 2**20  # of a step
_META = torch.device("meta")


class Calls(NamedTuple):
    """What the recorded calls of this engine's own work on, in one step."""

    linears: tuple[Linear | GroupedLinear, ...]
    head: Linear
    embedding: Linear
    device: torch.device
    step: StepInput | None = None
    kv_cache: KVCache = ()
    layers: tuple[AttentionSpec, ...] = ()
    used_experts: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Recording:
    """What transformers' modelling code of a model does.

    Attributes:
        body: (None, ``Calls``, tensors, input ids ``[T]``, positions ``[T]``) -> what the head takes, ``[T, D]``.
        head: (None, ``Calls``, tensors, rows ``[R, D]``) -> logits ``[R, V]``.
        body_tensors, head_tensors: names of the parameters and buffers of the module that they take.
        constants: tensors that the code makes by itself, by the names that these have among the others.
        layers: each layer's attention.
        hidden_size: D.
        top_k: experts that a token uses, of the linear layers of these numbers.
    """

    module: Module
    dtype: torch.dtype
    body: Callable[..., Tensor]
    head: Callable[..., Tensor]
    body_tensors: tuple[str, ...]
    head_tensors: tuple[str, ...]
    constants: dict[str, Tensor]
    layers: tuple[AttentionSpec, ...]
    hidden_size: int
    vocab_size: int
    top_k: dict[int, int]


@functools.lru_cache(maxsize=8)
def recorded(architecture: str, fields: str, dtype: torch.dtype) -> Recording:
    """The recording of ``TransformersConfig.fields``. ``ValueError`` for what cannot be recorded, with its place."""
    try:
        return _recorded(fields, dtype)
    except Exception as error:  # whatever transformers' code raises, on tensors that it was not written for
        told = " ".join(f"{error}".split())
        raise ValueError(
            f"config.json: {architecture} cannot run through transformers' modelling code here: "
            f"{'' if isinstance(error, Unsupported) else f'{type(error).__name__}: '}{told:.300}{_place(error)}"
        ) from error


def _recorded(fields: str, dtype: torch.dtype) -> Recording:
    module, recorder = make_module(fields, dtype), AttentionRecorder()
    config = module.model.config.get_text_config()
    ids = torch.empty(7, dtype=torch.int32, device=_META)
    body = _export(Body(module.model, recorder), ids, ids.clone())
    hidden = _output(body)
    head = _export(Head(module.model), torch.empty(7, hidden.shape[1], dtype=hidden.dtype, device=_META))
    vocab_size = _output(head).shape[1]
    body_names, body_constants = _lifted(body, f"{module.body_path}.", "body")
    head_names, head_constants = _lifted(head, "", "head")
    return Recording(
        module=module,
        dtype=dtype,
        body=_function(body),
        head=_function(head),
        body_tensors=body_names,
        head_tensors=head_names,
        constants=body_constants | head_constants,
        layers=recorder.specs(config.num_hidden_layers),
        hidden_size=hidden.shape[1],
        vocab_size=vocab_size,
        top_k=_top_k(module.model),
    )


def _top_k(model: torch.nn.Module) -> dict[int, int]:
    experts = [part for part in model.modules() if isinstance(part, RecordedExperts)]
    return {part.index + layer: part.top_k for part in experts for layer in (0, 1)}


def _export(module: torch.nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    """``module`` for inputs of any number of rows."""
    rows = torch.export.Dim("rows", min=1, max=_MOST_TOKENS)
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=[{0: rows}] * len(inputs), strict=False)


def _output(program: torch.export.ExportedProgram) -> Tensor:
    """The described output."""
    (output,) = program.graph.find_nodes(op="output")
    return output.args[0][0].meta["val"]


def _lifted(program: torch.export.ExportedProgram, path: str, of: str) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Names of the tensors that the program takes before its inputs, and those of them that its code made by itself.

    ``path`` is that of the program's ``model`` in the whole model.
    """
    names, constants = [], {}
    for spec in program.graph_signature.input_specs:
        if spec.target is None:
            continue  # an input
        if spec.kind is InputKind.CONSTANT_TENSOR:
            names.append(f"{of}.{spec.target}")
            constants[names[-1]] = program.constants[spec.target]
        else:
            names.append(f"{path}{spec.target.removeprefix('model.')}")
    return tuple(names), constants


# -- From the program to a function of tensors


def _function(program: torch.export.ExportedProgram) -> Callable[..., Tensor]:
    """(None, ``Calls``, the tensors of ``_lifted``, inputs) -> output."""
    graph, ours = program.graph, torch.ops.compiled_llm
    with graph.inserting_before(next(iter(graph.nodes))):
        calls = graph.placeholder("calls")
    own = {getattr(ours, f"recorded_{name}").default: function for name, function in _RECORDED.items()}
    checks = recorded_checks()
    last_input = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last_input):
        device = graph.call_function(_device, (calls,))
    for node in list(graph.nodes):
        if node.op in ("call_module", "get_attr"):
            raise Unsupported(f"a call of {node.target}, which cannot be recorded")
        if node.target in checks:
            graph.erase_node(node)
        elif node.target in own:
            node.args, node.target = (calls, *node.args), own[node.target]
        elif node is not device:
            node.args = fx.node.map_aggregate(node.args, lambda x: device if x == _META else x)
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda x: device if x == _META else x)
    (output,) = graph.find_nodes(op="output")
    output.args = (output.args[0][0],)
    graph.eliminate_dead_code()
    graph.lint()
    return type(fx.GraphModule({}, graph)).forward


def _device(calls: Calls) -> torch.device:
    return calls.device


def _linear(calls: Calls, x: Tensor, index: int, out_features: int) -> Tensor:
    """``[1, T, K]`` or ``[T, K]`` -> the same rows of ``out_features``."""
    linear = calls.head if index == HEAD else calls.linears[index]
    assert isinstance(linear, Linear)
    return linear.apply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], out_features)


def _embedding(calls: Calls, ids: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    return calls.embedding.rows(ids[0])[None]


def _expert_rows(calls: Calls, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    assert calls.step is not None
    assert calls.used_experts is not None
    return expert_rows(experts, calls.step.query_start_loc[-1:], calls.used_experts, num_experts)


def _experts(
    calls: Calls, x: Tensor, rows: Tensor | None, tokens: Tensor, starts: Tensor, index: int, out_features: int
) -> Tensor:
    layer = calls.linears[index]
    assert isinstance(layer, GroupedLinear)
    return experts_of(layer, x, rows, tokens, starts)


def _attention(calls: Calls, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int) -> Tensor:
    spec, cache, step = calls.layers[layer], calls.kv_cache[layer], calls.step
    assert step is not None
    value_dim = v.shape[2]
    if value_dim < spec.head_dim:  # the cache has keys and values of one size
        v = F.pad(v, (0, spec.head_dim - value_dim))
    out = attend(q, k, v, spec, cache, step, None if sinks is None else sinks.float())
    return out.unflatten(1, (spec.num_heads, spec.head_dim))[..., :value_dim]


# The end of an op's name that stands in a graph -> what it is in a step.
_RECORDED: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "embedding": _embedding,
    "expert_rows": _expert_rows,
    "experts": _experts,
    "attention": _attention,
}


def _place(error: BaseException) -> str:
    """Where transformers' code stood when ``error`` was raised, as " (FILE, line N)"."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/models/" in frame.filename]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
