"""Gemma 4's language model in models without encoders (12B): that of ``gemma4.py``, under another name."""

import dataclasses

from compiled_llm.models import gemma4

FAMILY = dataclasses.replace(
    gemma4.FAMILY,
    hf_config="Gemma4UnifiedTextConfig",
    requires={**gemma4.FAMILY.requires, "use_double_wide_mlp": (False,)},
)
