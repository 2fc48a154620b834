"""Ministral: Mistral whose layers have a window or not, as ``layer_types`` says."""

import dataclasses

from compiled_llm.models import llama
from compiled_llm.models.config import WindowedConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.layers.attention import windowed_layers
from compiled_llm.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinistralConfig(LlamaConfig, WindowedConfig):
    """Llama's fields and the windows'."""


def layers(config: MinistralConfig) -> Layers:
    """Llama's, with a window where ``layer_types`` says so."""
    return windowed_layers(config, llama.layers(config)[0])


FAMILY = Family(
    "MinistralConfig", MinistralConfig, llama.take, layers, llama.forward, llama.head, requires=llama.FAMILY.requires
)
