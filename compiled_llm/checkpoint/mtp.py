"""A layer of the model's own checkpoint that drafts: which engine arguments it has, and how its files keep it."""

import dataclasses
from pathlib import Path

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.gguf.directory import has_index
from compiled_llm.checkpoint.loader import located
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.mtp import mtp_config
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.published import Published
from compiled_llm.models.quantized.scheme import Scheme

_PLAIN = ("BF16", "F16", "F32")


def mtp_arguments(config: EngineConfig, target: ModelConfig, directory: Path) -> tuple[EngineConfig, ModelConfig]:
    """Engine arguments as they are for the layer, and its config.

    It is quantised as the model's layers are: by its files, else by ``quantization``, its own or else the model's.

    Raises:
        ValueError: the model in ``directory`` has no such layer, or it is not read; or another quantisation of it is
            asked for than that of a checkpoint that is quantised.
    """
    found = mtp_config(target)
    if has_index(directory):
        raise ValueError(
            "speculative_config: method 'mtp' reads safetensors, given a GGUF file, of which the layers that guess are "
            "left. Load the checkpoint that it was made from, or choose another method"
        )
    assert config.speculation is not None
    asked, of_model = config.speculation.quantization, config.quantization
    if asked not in (None, "none") and target.published:
        raise ValueError(
            f"speculative_config: quantization must be left out for method 'mtp' where the checkpoint is quantised, "
            f"which has the layer, too, given {asked!r}"
        )
    if asked is not None:
        config = dataclasses.replace(
            config,
            quantization=None,
            quantization_group_size=None,
            quantization_head="auto",
            quantization_embedding="none",
            quantization_skip=(),
            keep_weights_twice=config.keep_weights_twice and asked == "none",
        )
        of_model = None if asked == "none" else asked
    own = dataclasses.replace(
        config,
        kv_cache_skip_layers=(),
        quantization=None if target.published else of_model,
        quantization_skip=(),
        quantization_activations="auto",
        sliding_window=None,
        attention_sink_tokens=0,
        num_state_slots=None,
        speculative_config=None,
    )
    return own, found


def as_stored(linears: LinearKind, directory: Path) -> LinearKind:
    """``linears``, in which layers are plain whose weights in ``directory`` are, whatever the config says.

    Those that quantise a model often leave the layer that guesses, or its projection, and do not write it down.
    """
    if not isinstance(linears, Published) or not any(directory.glob("*.safetensors")):
        return linears
    stored, plan = located(directory), linears.plan

    def scheme(module: str) -> Scheme | None:
        weight = stored.get(f"{module}.weight")
        return None if weight is not None and weight.dtype in _PLAIN else plan.scheme(module)

    return dataclasses.replace(linears, plan=plan._replace(scheme=scheme))
