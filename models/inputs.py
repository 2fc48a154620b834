"""What every model's forward receives besides its weights: the step's tensors and the KV cache."""

from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.ops import DecodePlan
from compiled_llm.ops.recurrent.state_rows import StateRows


class BlockTable(NamedTuple):
    """Where layers find the keys of a step's requests. Letters as in ``StepInput``; int32."""

    slot_mapping: Tensor  # [T] where a token's key and value go: block * block_size + offset
    block_table: Tensor  # [R, M]; on a GPU, to the step without ``seq_lens``: of all requests
    seq_lens: Tensor | None = None  # [R] keys of each request in these caches; None: all of them


class StepInput(NamedTuple):
    """The tokens of one step, all int32, in buffers of the bucket's fixed size. No Python number: sizes are static.

    Letters: T tokens of the bucket, R requests of the bucket, L logits rows of the bucket (R, or a multiple of R where
    tokens are drafted), M blocks of a table row.
    """

    input_ids: Tensor  # [T]
    positions: Tensor  # [T] position of each token in its request
    slot_mapping: Tensor  # [T] where its key and value go: block * block_size + offset
    query_start_loc: Tensor  # [R + 1] prefix sums of the tokens per request
    seq_lens: Tensor  # [R] keys of each request after this step; 0 for padding
    logits_indices: Tensor  # [L] the tokens whose logits are computed, a request's last one among them; 0 for padding
    block_table: Tensor  # [R, M]; on a GPU, to the step: of all requests
    windows: tuple[BlockTable, ...] = ()  # of layers with a window of keys, whose caches hold little more than that
    table_rows: Tensor | None = None  # [R] on a GPU: where the tables of all requests have those of this step's
    plans: tuple[DecodePlan, ...] = ()  # of a decode on a GPU, for ``AttentionSpec.plan``; the step makes them
    states: StateRows | None = None  # of models that have layers with a state
    features: Tensor | None = None  # [T, F] of networks that draft from a model's hidden states
    adapter_slots: Tensor | None = None  # [T] where the adapter of each token's request lies; 0: it has none
    ancestors: Tensor | None = None  # [T] int64, as the attention op has them; None where no drafts are a tree
    kept_rows: Tensor | None = None  # [K] the tokens that go on behind the last attention, to which ``logits_indices``
    # refer then; None: all


class LayerCache(NamedTuple):
    """One layer's keys and values, and their scales if they are quantised. Written in place by the attention op.

    Of latent attention ``k`` has the turned part of keys, and ``v`` the latents.
    """

    k: Tensor  # [B, K, S, H]
    v: Tensor  # [B, K, S, H], of latents [B, 1, S, C]
    k_scale: Tensor | None = None  # [B, K, S] float32
    v_scale: Tensor | None = None  # [B, K, S] float32


class StateCache(NamedTuple):
    """One layer's states, in slots of which the first is the sink. Written in place by the ops of ``ops/recurrent``."""

    convolution: Tensor  # [slots, width - 1, C]
    recurrent: Tensor | None = None  # [slots, ...] float32


class FeatureCache(NamedTuple):
    """What a network that drafts has of the model's hidden states, for each token."""

    features: Tensor  # [B, S, F]


class HiddenCache(NamedTuple):
    """What features are made of once they are read, in the place of a ``FeatureCache``.

    Or what goes into the model's last layer (``last_layer.py``), which gives what they are made of.
    """

    hidden: Tensor  # [B, S, *]


KVCache = tuple[Any, ...]  # a ``LayerCache`` for each layer with attention, a ``StateCache`` for each with a state
