"""The config of a model that runs through transformers' modelling code: all of ``config.json``."""

import dataclasses

from compiled_llm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A model's shape as its modelling code shows it, and what that code is made of.

    Attributes:
        dtype: that the engine runs the model in: transformers' code may round by it.
        fields: ``config.json``, as JSON.
        transformers_version: whose code it is.
    """

    fields: str
    transformers_version: str
