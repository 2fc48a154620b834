"""What each layer of a model costs, to share layers out to stages by time."""

from pathlib import Path

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import bytes_to_read
from compiled_llm.system.progress import StartProgress


def layer_costs(
    config: EngineConfig, model_config: ModelConfig, directory: Path, progress: StartProgress
) -> list[float]:
    """Of each layer; of the first with the embedding, of the last with the head."""
    weights = family_of(model_config).describe(model_config).weights
    costs = [float(bytes_to_read(layer)) for layer in weights.layers]
    costs[-1] += bytes_to_read(weights.head)
    return costs
