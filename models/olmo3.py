"""OLMo 3 (OLMo team, 2025): OLMo 2 with windows in three of four layers.

The rotary embedding of the others alone is scaled to longer texts.
"""

import dataclasses
from typing import Any

from compiled_llm.models import llama, olmo2
from compiled_llm.models.config import FULL, SLIDING, WindowedConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.layers.attention import windowed_layers
from compiled_llm.models.olmo2 import Olmo2Config
from compiled_llm.models.rope_config import Rope, check_by_layer_type, read_ropes_by_layer_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(WindowedConfig, Olmo2Config):
    pass


def layers(config: Olmo3Config) -> Layers:
    """Those of ``layer_types``: with the window and without."""
    return windowed_layers(config, olmo2.layers(config)[0])


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """That of layers without a window, and that of layers with one."""
    return read_ropes_by_layer_type(config.rope_parameters, (FULL, SLIDING), config.max_position_embeddings)


FAMILY = Family(
    "Olmo3Config",
    Olmo3Config,
    olmo2.take,
    layers,
    olmo2.forward,
    llama.head,
    requires=olmo2.FAMILY.requires,
    read_ropes=read_ropes,
    check=check_by_layer_type,
    old_fields=olmo2.FAMILY.old_fields,
)
