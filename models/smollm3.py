"""SmolLM3: Llama, with layers that turn nothing by its position (Kazemnejad et al., 2023, arXiv:2305.19466)."""

import dataclasses
from typing import Any

from compiled_llm.models import llama
from compiled_llm.models.config import WindowedConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.layers.attention import windowed_layers
from compiled_llm.models.llama import LlamaConfig
from compiled_llm.models.rope_config import Rope, read_rope


@dataclasses.dataclass(frozen=True)
class SmolLM3Config(LlamaConfig, WindowedConfig):
    """``no_rope_layers`` and ``layer_types`` follow from the other fields where the file leaves them out."""

    no_rope_layers: tuple[int, ...] = ()  # of each layer 1: with rotary embeddings, or 0: without
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.no_rope_layers) < self.num_layers or not {0, 1}.issuperset(self.no_rope_layers):
            raise ValueError(
                f"config.json: no_rope_layers must be 0 or 1 for each of the {self.num_layers} layers, given "
                f"{self.no_rope_layers!r:.200}"
            )


def layers(config: SmolLM3Config) -> Layers:
    """Llama's, some of them without positions, with a window where ``layer_types`` says so."""
    specs = zip(windowed_layers(config, llama.layers(config)[0]), config.no_rope_layers, strict=False)
    return tuple(dataclasses.replace(spec, rotary=bool(rotary)) for spec, rotary in specs)


def read_ropes(config: dict[str, Any]) -> tuple[Rope, ...]:
    """One for all layers that have positions."""
    return (read_rope(config, default_theta=2000000.0),)


FAMILY = Family(
    "SmolLM3Config",
    SmolLM3Config,
    llama.take,
    layers,
    llama.forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=read_ropes,
    old_fields=("head_dim",),
)
