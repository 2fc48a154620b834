"""SmolLM3: Llama, with layers that turn nothing by its position (Kazemnejad et al., 2023, arXiv:2305.19466)."""

import dataclasses
from typing import Any

from compiled_llm.models import llama
from compiled_llm.models.config import WindowedConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.layers.attention import windowed_layers
from compiled_llm.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig, WindowedConfig):
    """``no_rope_layers`` and ``layer_types`` follow from the other fields where the file leaves them out."""

    no_rope_layers: tuple[int, ...]  # of each layer 1: with rotary embeddings, or 0: without
    no_rope_layer_interval: int
    use_sliding_window: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_layers(self.no_rope_layers, self.num_layers)


def _check_layers(no_rope_layers: Any, num_layers: int) -> None:
    """``ValueError`` unless it is 0 or 1 for each layer."""
    if (
        not isinstance(no_rope_layers, list | tuple)
        or len(no_rope_layers) < num_layers
        or any(value not in (0, 1) for value in no_rope_layers)
    ):
        raise ValueError(
            f"config.json: no_rope_layers must be 0 or 1 for each of num_hidden_layers={num_layers} layers, given "
            f"{no_rope_layers!r:.200}"
        )


def check(config: dict[str, Any]) -> None:
    """transformers makes ``layer_types`` of these, without a look at them."""
    if config["no_rope_layers"] is not None and config["num_hidden_layers"] is not None:
        _check_layers(config["no_rope_layers"], config["num_hidden_layers"])
    interval = config["no_rope_layer_interval"]
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(
            f"config.json: no_rope_layer_interval must be an integer of at least 1, given {interval!r:.100}"
        )


def layers(config: SmolLM3Config) -> Layers:
    """Llama's, some of them without positions, with a window where ``layer_types`` says so."""
    specs = zip(windowed_layers(config, llama.layers(config)[0]), config.no_rope_layers, strict=False)
    return tuple(dataclasses.replace(spec, rotary=bool(rotary)) for spec, rotary in specs)


FAMILY = Family(
    "SmolLM3Config",
    SmolLM3Config,
    llama.take,
    layers,
    llama.forward,
    llama.head,
    requires=llama.FAMILY.requires,
    check=check,
    old_fields=("head_dim",),
)
