"""Mistral: Llama whose layers may all have a sliding window (Jiang et al., 2023, arXiv:2310.06825)."""

import dataclasses

from compiled_llm.models import llama
from compiled_llm.models.config import check_window
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    sliding_window: int | None  # None: queries see all keys

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            check_window(self.sliding_window)


def layers(config: MistralConfig) -> Layers:
    """Llama's, with the window."""
    return tuple(dataclasses.replace(spec, window=config.sliding_window or 0) for spec in llama.layers(config))


FAMILY = Family(
    "MistralConfig", MistralConfig, llama.take, layers, llama.forward, llama.head, requires=llama.FAMILY.requires
)
