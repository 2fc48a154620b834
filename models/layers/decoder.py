"""The layers of a decoder: attention (or what has its place) and an MLP in turn, each added to a residual stream."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from compiled_llm.models.inputs import KVCache, StateCache, StepInput
from compiled_llm.models.layers.attention import Spec, attended
from compiled_llm.models.layers.mlp import MlpWeights, PlainMlpWeights, mlp_block
from compiled_llm.models.layers.norm import Norm, add_norm, added
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.fused import activated_linear, added_linear, normed_linear
from compiled_llm.models.linears.protocol import Linear


class StateMixer(Protocol):
    """What stands in the place of attention in a layer with a state: a NamedTuple of tensors and linear layers."""

    @property
    def qkv(self) -> Linear:
        """All that is computed of the layer's input alone."""

    @property
    def o(self) -> Linear:
        """The output."""

    def mixed(
        self, qkv: Tensor, cache: StateCache, step: StepInput, spec: StateSpec, eps: float, max_query_len: int
    ) -> Tensor:
        """What ``o`` takes, ``[T, ...]``, of what ``qkv`` gave. Also writes the requests' states to the cache.

        Pure besides. ``eps`` is that of the model's norms, and ``max_query_len`` an upper bound of a request's tokens.
        """


class LayerWeights(NamedTuple):
    input_norm: Norm | None  # [D], of what attention gets; None for none
    attention: Any  # AttentionWeights or LatentAttentionWeights; in a layer with a state a StateMixer
    mlp_norm: Norm | None  # [D], of what the MLP gets
    mlp: Any  # MlpWeights or PlainMlpWeights; in families with experts also MoeWeights; None: the layer has none
    attention_norm: Tensor | None = None  # [D], an RMS norm of what attention gave
    output_norm: Tensor | None = None  # [D], of what the MLP gave


Experts = Callable[[Tensor, Tensor | None, Any, float, Any], tuple[Tensor, Tensor | None]]
"""(x, delta, norm, eps, weights) -> x, delta: as ``mlp_block`` takes and gives them."""

Attention = Callable[..., Tensor]
"""Takes and gives what ``attended`` does."""


def decoder_layers(
    x: Tensor,
    layers: Sequence[LayerWeights],
    step: StepInput,
    kv_cache: KVCache,
    specs: Sequence[Spec],
    max_query_len: int,
    *,
    eps: float,
    angles: Sequence[Tensor] = (),
    activation: str = "silu",
    multiplier: float = 1.0,
    parallel: bool = False,
    query_scale: Tensor | None = None,
    experts: Experts | None = None,
    final_norm: Norm | None = None,
    attention: Attention = attended,
) -> Tensor:
    """What the last layer gives, ``[T, D]``; the step's keys and values go to ``kv_cache``.

    Args:
        x: ``[T, D]``, what the first layer gets.
        eps: of all norms.
        angles: cosines and sines, see ``rope_cos_sin``; of two, the last are those of layers with a window.
        activation: of the MLPs.
        multiplier: of all that is added to the residual stream.
        parallel: attention and MLP get the same, and their sum is added.
        query_scale: see ``attended``.
        experts: for weights that are not an MLP's.
        final_norm: of the result, if it is to be normalised.
        attention: what stands between the layers ``qkv`` and ``o`` of a layer with attention.
    """
    delta: Tensor | None = None  # what is still to be added to x: its norm, if there is one
    delta_norm: Tensor | None = None
    for w, cache, spec in zip(layers, kv_cache, specs, strict=True):
        x, qkv = normed_linear(x, delta, w.input_norm, eps, w.attention.qkv, delta_norm=delta_norm)
        if isinstance(spec, StateSpec):
            out = w.attention.mixed(qkv, cache, step, spec, eps, max_query_len)
        else:
            cos_sin = angles[-1 if spec.window else 0] if angles else None
            out = attention(qkv, w.attention, cos_sin, cache, step, spec, eps, max_query_len, query_scale)
        beside = activated_linear(out, w.attention.o) if parallel else None
        if parallel:
            delta = None
        else:
            x, delta = added_linear(x, w.attention.o, out, w.attention_norm, multiplier)
        delta_norm = w.attention_norm
        if w.mlp is None:
            assert not parallel, "nothing is beside it"
            continue
        if isinstance(w.mlp, MlpWeights | PlainMlpWeights):
            x, delta = mlp_block(
                x, delta, w.mlp_norm, eps, w.mlp, activation,
                delta_norm=delta_norm, output_norm=w.output_norm, multiplier=multiplier, beside=beside,
            )  # fmt: skip
        else:
            assert experts is not None
            assert delta_norm is None, "no family has it beside experts"
            x, delta = experts(x, delta, w.mlp_norm, eps, w.mlp)
        delta_norm = w.output_norm
    if final_norm is not None:
        return add_norm(x, delta, final_norm, eps, delta_norm)[1]
    return added(x, delta, eps, delta_norm)
