"""ModelConfig: what a checkpoint's ``config.json`` says of its model, as far as every family has it."""

import dataclasses
import math
from typing import Any, Self

from compiled_llm.api.streaming import Stream
from compiled_llm.models.rope_config import Rope

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model's shape. Hashable, so a graph may be keyed by it.

    A family whose ``config.json`` has more fields that matter adds them in a subclass, under the names that they have
    there. Lists become tuples, since everything here is hashable. Defaults are those of transformers' class. A field
    that it lacks needs one, and keeps it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[Rope, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    stream: Stream | None = dataclasses.field(default=None, kw_only=True)  # the engine's, not config.json's
    published: str = dataclasses.field(
        default="", kw_only=True
    )  # quantization_config of a checkpoint's linear layers, JSON
    gguf_layout: str = dataclasses.field(
        default="", kw_only=True
    )  # GGUF's name of the architecture, where its files cut tensors in another way than the hub's
    num_ranks: int = dataclasses.field(default=1, kw_only=True)  # that share all layers (``rank_config``); the engine's
    own_layers: tuple[int, int] | None = dataclasses.field(
        default=None, kw_only=True
    )  # of a stage (``stages.py``): its first layer, and the one behind its last; None: all. The engine's

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads must be a multiple of num_key_value_heads, given {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                "config.json: head_dim, else hidden_size // num_attention_heads, must be even (rotary embedding), "
                f"given {self.head_dim}"
            )
        for rope in self.ropes:
            rope.check(self.head_dim)
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"config.json: rms_norm_eps must be a number of at least 0, given {self.rms_norm_eps}")
        if self.dtype not in DTYPES:
            raise ValueError(f"config.json: dtype must be one of {', '.join(DTYPES)}, given {self.dtype!r:.100}")

    @property
    def whole(self) -> Self:
        """The config of the model that a stage is of."""
        return self if self.own_layers is None else dataclasses.replace(self, own_layers=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig(ModelConfig):
    """A model whose checkpoints may have layers that guess further tokens.

    Attributes:
        num_mtp_layers: how many, by ``config.json``; 1 where it says nothing.
        num_layers_before: in the config of one of them alone: the layers of the model. The engine's.
    """

    num_mtp_layers: int = 1
    num_layers_before: int = 0


def num_mtp_layers(full: Any, *fields: str) -> dict[str, int]:
    """``Family.sizes``: ``num_mtp_layers``, the first of ``fields`` that transformers' config has."""
    return {"num_mtp_layers": next((getattr(full, name) or 0 for name in fields if hasattr(full, name)), 1)}


SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedConfig(ModelConfig):
    """A model some of whose layers see a window of keys: those that ``layer_types`` calls ``SLIDING``."""

    sliding_window: int | None
    layer_types: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self, SLIDING, FULL)
        if SLIDING in self.layer_types:
            check_window(self.sliding_window)


def check_layer_types(config: Any, *kinds: str, said: str | None = None) -> None:
    """``ValueError`` unless ``layer_types`` has one of ``kinds`` for each layer. ``said``: how messages call them."""
    if len(config.layer_types) != config.num_layers or not set(kinds).issuperset(config.layer_types):
        raise ValueError(
            f"config.json: layer_types must be {said or ' or '.join(map(repr, kinds))} for each of "
            f"num_hidden_layers={config.num_layers} layers, given {config.layer_types!r:.200}"
        )


def check_at_least_one(config: Any, *names: str) -> None:
    """``ValueError`` unless each of these fields is from 1 to 2**24."""
    for name in names:
        if not 0 < getattr(config, name) <= 2**24:
            raise ValueError(f"config.json: {name} must be at least 1, given {getattr(config, name)!r:.100}")


def check_positive(config: Any, *names: str) -> None:
    """``ValueError`` unless each of these fields is a finite number above 0."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"config.json: {name} must be a positive number, given {getattr(config, name)!r:.100}")


def check_window(window: int | None) -> None:
    """``ValueError`` unless ``sliding_window`` is a number of keys."""
    if window is None or window < 1:
        raise ValueError(f"config.json: sliding_window must be at least 1, given {window}")
    if window >= 2**31:
        raise ValueError(f"config.json: sliding_window must be at most {2**31 - 1}, given {window!r:.100}")
