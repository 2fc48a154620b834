"""What transformers' modelling code calls as its attention while it is recorded.

transformers lets a model's attention be any function that is registered under a name (``AttentionInterface``), and its
masks likewise. Ours computes nothing: it notes what each layer asks for, and stands in the recorded graph for the paged
op. What that op cannot do is refused by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.ops.library import define_op

ATTENTION = "compiled_llm"
"""The name of attention and masks in transformers, and of the argument that brings an ``AttentionRecorder``."""

# Stands in a recorded graph, and is never run.
define_op(
    "recorded_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer) -> Tensor",
    fake=lambda q, k, v, sinks, layer: q.new_empty((*q.shape[:2], v.shape[2])),
)

# Arguments that change nothing where a step has its own masks and cache, and no training.
_NO_EFFECT = {
    "cache_position",
    "deterministic",
    "dropout",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "sliding_window",  # the mask says so
    "use_cache",
}


class Unsupported(ValueError):
    """Something in a model's code that this engine cannot do; the message says what."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask as transformers' code asks for it.

    Attributes:
        sees: whether a query sees a key, from (batch, head, query, key).
        window: of a mask that has one, or another local size.
    """

    sees: Callable[..., Any]
    window: int | None

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"code that computes with its mask ({name})")


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a call of attention asked for, for ``q`` ``[T, N, H]``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    mask: Mask
    soft_cap: float


class AttentionRecorder:
    """Is handed through a model to its attention, and notes what each layer asks for."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, given: dict
    ) -> Tensor:
        """Attention of ``layer``, whose tensors are ``[1, N, T, H]`` and ``[1, K, T, H]`` -> ``[1, T, N, H]``.

        Args:
            given: the other arguments that the model's code gives.
        """
        if layer in self._asked:
            raise Unsupported(f"attention that runs twice in layer {layer}")
        if not isinstance(mask, Mask):
            raise Unsupported(f"attention with a mask of its own kind ({type(mask).__name__}) in layer {layer}")
        sinks, soft_cap = given.pop("s_aux", None), given.pop("softcap", None)
        if given.pop("is_causal", None) is False:
            raise Unsupported(f"attention that is not causal in layer {layer}")
        unknown = sorted(name for name, value in given.items() if value is not None and name not in _NO_EFFECT)
        if unknown:
            raise Unsupported(f"attention with {', '.join(unknown)} in layer {layer}")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if k.shape[2] != q.shape[2] or v.shape[2] > q.shape[2] or k.shape[:2] != v.shape[:2]:
            raise Unsupported(
                f"queries, keys and values of {tuple(q.shape[1:])}, {tuple(k.shape[1:])} and {tuple(v.shape[1:])} "
                f"(heads, elements of one) in layer {layer}"
            )
        self._asked[layer] = _Asked(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            scale=float(q.shape[2] ** -0.5 if scale is None else scale),
            mask=mask,
            soft_cap=float(soft_cap or 0.0),
        )
        return torch.ops.compiled_llm.recorded_attention(q, k, v, sinks, layer)[None]

    def specs(self, num_layers: int) -> tuple[AttentionSpec, ...]:
        """Each layer's attention. ``Unsupported`` if the model has other layers, or a mask that the op has not."""
        missing = sorted(set(range(num_layers)) - self._asked.keys())
        if missing or len(self._asked) != num_layers:
            raise Unsupported(
                f"layers without attention that is registered with AttentionInterface: {missing or 'none'} of "
                f"{num_layers}"
            )
        for mask in dict.fromkeys(asked.mask for asked in self._asked.values()):  # layers share masks
            if not _is_causal(mask.sees, mask.window or 0):
                of = [layer for layer, asked in self._asked.items() if asked.mask == mask]
                raise Unsupported(f"a mask that is neither causal nor a sliding window in layers {of}")
        return tuple(_spec(self._asked[layer]) for layer in range(num_layers))


def _spec(asked: _Asked) -> AttentionSpec:
    window = asked.mask.window or 0
    return AttentionSpec(
        asked.num_heads, asked.num_kv_heads, asked.head_dim, asked.scale, window=window, soft_cap=asked.soft_cap
    )


def _is_causal(sees: Callable[..., Any], window: int) -> bool:
    """Whether ``sees`` is a causal mask with ``window`` (0: without one), tried around all that could matter."""
    edges = [0, 1, 2, 7, 64, 4096, 2**17 + 3]
    places = sorted({edge + w * turn for edge in edges for w in (window or 1000,) for turn in range(4)})
    for query in places:
        for distance in (-5, -1, 0, 1, 2, 31, 1000, window - 1, window, window + 1, query):
            key = query - distance
            if key >= 0:
                expected = key <= query and (not window or key > query - window)
                found = sees(*map(torch.tensor, (0, 0, query, key)))
                if bool(found) != expected:
                    return False
    return True


def register() -> None:
    """Make attention and masks known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *given: Any, **named: Any
) -> tuple[Tensor, None]:
    """As transformers calls attention: ``scaling`` and whatever else a model gives is in ``named``."""
    recorder, layer = named.pop(ATTENTION, None), getattr(module, "layer_idx", None)
    if recorder is None:
        raise Unsupported(f"{type(module).__name__}, which does not hand on to attention what the model is called with")
    if given or layer is None or query.shape[0] != 1:
        raise Unsupported(f"{type(module).__name__}, which calls attention in a way of its own")
    return recorder.attend(layer, query, key, value, attention_mask, named.pop("scaling", None), named), None


def _mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **other: Any) -> Mask:
    """As transformers calls for a mask."""
    return Mask(mask_function, local_size)
