"""The families there are. Their files are imported when asked for."""

import dataclasses
import importlib
from typing import Any

from compiled_llm.api.streaming import Stream
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.family import Family, Layers, MixedLayers
from compiled_llm.models.layers.attention import AttentionSpec, Spec
from compiled_llm.models.layers.state import StateSpec

# Architecture, as it is in config.json -> the file of its family, and what it is to a user.
# This is the allow-list: besides these, only classes that transformers itself ships are run (models/fallback).
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", "Llama 2, 3, 3.1, 3.2 and others of that architecture"),
    "MistralForCausalLM": ("mistral", "Mistral, Mistral Nemo, Mistral Small (text)"),
    "MinistralForCausalLM": ("ministral", "Ministral with layer_types"),
    "Ministral3ForCausalLM": ("ministral3", "Ministral 3"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLM3"),
    "GraniteForCausalLM": ("granite", "Granite 3, dense"),
    "GraniteMoeHybridForCausalLM": ("granite_hybrid", "Granite 4"),
    "NemotronHForCausalLM": ("nemotron_h", "Nemotron-H, Nemotron Nano 2 and Nemotron 3"),
    "Phi3ForCausalLM": ("phi3", "Phi-3, Phi-3.5 and Phi-4"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2 and Qwen2.5"),
    "SeedOssForCausalLM": ("seed_oss", "Seed-OSS"),
    "Qwen3ForCausalLM": ("qwen3", "dense Qwen3"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3-Next"),
    "Qwen3_5ForCausalLM": ("qwen3_5", "Qwen3.5, dense"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", "Qwen3.5 with experts"),
    "Lfm2MoeForCausalLM": ("lfm2_moe", "LFM2 with experts"),
    "Lfm2ForCausalLM": ("lfm2", "LFM2 and LFM2.5"),
    "GptOssForCausalLM": ("gpt_oss", "gpt-oss"),
    "MixtralForCausalLM": ("mixtral", "Mixtral"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "DeepSeek-V2-Lite"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "DeepSeek-V3 and R1"),
    "Mistral4ForCausalLM": ("mistral4", "Mistral Small 4"),
    "Glm4MoeForCausalLM": ("glm4_moe", "GLM-4.5, 4.6 and 4.7"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3 with experts"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma 2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma 3"),
    "Gemma4ForCausalLM": ("gemma4", "Gemma 4"),
    "Gemma4UnifiedForCausalLM": ("gemma4_unified", "Gemma 4 without encoders"),
    "Olmo2ForCausalLM": ("olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": ("olmo3", "OLMo 3"),
    "GlmForCausalLM": ("glm", "GLM-4 of 2024"),
    "Glm4ForCausalLM": ("glm4", "GLM-4 of 2025, dense"),
    "Starcoder2ForCausalLM": ("starcoder2", "StarCoder 2"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GPT-NeoX and Pythia"),
    "GPT2LMHeadModel": ("gpt2", "GPT-2"),
}
# Networks that draft from a model's hidden states -> their files. Only ``speculative_config`` leads to them.
DRAFT_HEADS = {"eagle3": "eagle3", "medusa": "medusa"}
MTP = ".mtp"
"""What the architecture of a model's own layer that guesses ends with, behind the model's (``draft_heads/mtp.py``)."""
# Models with more than text, whose language model alone is loaded -> model_type of their text_config -> what that is.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
}
# For messages.
SUPPORTED = "Supported are {}; docs/models.md lists them".format(
    ", ".join(f"{models} ({architecture})" for architecture, (_, models) in ARCHITECTURES.items())
)


def with_stream(config: ModelConfig, stream: Stream | None) -> ModelConfig:
    """``config`` for an engine whose requests see what ``stream`` says.

    Raises:
        ValueError: tokens of this model depend on their position itself, not on their distance from others.
    """
    if stream is None:
        return config
    if isinstance(config, TransformersConfig):
        raise ValueError(
            f"sliding_window must be None for {config.architecture}, which runs through transformers' modelling code, "
            f"given {stream.window}"
        )
    layers = family_of(config).layers(config)
    if any(isinstance(spec, StateSpec) for spec in layers):
        raise ValueError(
            f"sliding_window must be None for {config.architecture}, some of whose layers keep a state of all tokens, "
            f"given {stream.window}"
        )
    what = {0: "an embedding for each position", 1: ""}.get(
        len(config.ropes), "another rotary embedding in some layers"
    )
    if any(rope.query_beta for rope in config.ropes):
        what = "queries scaled by their position"
    if what:
        raise ValueError(
            f"sliding_window must be None for {config.architecture}, which has {what}: it needs one rotary embedding "
            f"alone, given {stream.window}"
        )
    own = sorted({spec.window for spec in attention_layers(layers) if 0 < spec.window < stream.window})
    if stream.sink_tokens and own:
        raise ValueError(
            f"attention_sink_tokens must be 0 for {config.architecture} with sliding_window={stream.window}, since "
            f"some layers have a window of {own[0]} of their own, given {stream.sink_tokens} (in whole blocks). A "
            f"sliding_window of at most {own[0]} bounds them all"
        )
    ropes = tuple(dataclasses.replace(rope, precise=True) for rope in config.ropes)
    return dataclasses.replace(config, stream=stream, ropes=ropes)


def layers_of(config: ModelConfig) -> MixedLayers:
    """Each layer's attention or state, as the family has it, or as the engine's ``config.stream`` bounds it.

    Of a stage, those of its own layers, which are counted from its first.
    """
    layers, stream = family_of(config).layers(config), config.stream

    def bounded(spec: AttentionSpec, stream: Stream) -> AttentionSpec:
        return dataclasses.replace(spec, window=stream.window, sink_tokens=stream.sink_tokens)

    if stream is not None:
        layers = tuple(
            spec if 0 < spec.window < stream.window else bounded(spec, stream) for spec in attention_layers(layers)
        )
    if config.own_layers is None:
        return layers
    first, end = config.own_layers

    def counted(spec: Spec) -> Spec:
        if isinstance(spec, StateSpec) or spec.shares_cache_of is None:
            return spec
        return dataclasses.replace(spec, shares_cache_of=spec.shares_cache_of - first)

    return tuple(map(counted, layers[first:end]))


def attention_layers(layers: MixedLayers) -> Layers:
    """Of ``layers``, those with attention."""
    return tuple(spec for spec in layers if isinstance(spec, AttentionSpec))


def family(architecture: str) -> Family[Any, Any]:
    """The family of an architecture. ``ValueError`` for one that is not supported."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"config.json: architecture {architecture!r:.100} is not supported. {SUPPORTED}")
    return importlib.import_module(f"compiled_llm.models.{ARCHITECTURES[architecture][0]}").FAMILY


def has_own_file(architecture: str, model_impl: str) -> bool:
    """Whether a model runs through a file here, under the engine argument ``model_impl``; else through transformers'.

    Raises:
        ValueError: it has none, and only those with one are allowed.
    """
    if model_impl == "native":
        family(architecture)
    return model_impl == "native" or (model_impl == "auto" and architecture in ARCHITECTURES)


def code_of(config: ModelConfig) -> str:
    """Whose code computes a model, in words."""
    if isinstance(config, TransformersConfig):
        return f"transformers' modelling code ({config.architecture}, transformers {config.transformers_version})"
    return f"models/{ARCHITECTURES[config.architecture][0]}.py"


def family_of(config: ModelConfig) -> Family[Any, Any]:
    """The family that a model runs through."""
    if isinstance(config, TransformersConfig):
        return importlib.import_module("compiled_llm.models.fallback.family").family_of_recording(config)
    if config.architecture.endswith(MTP):
        mtp = importlib.import_module("compiled_llm.models.draft_heads.mtp")
        return mtp.FAMILIES[config.architecture.removesuffix(MTP)]
    if config.architecture in DRAFT_HEADS:
        return importlib.import_module(f"compiled_llm.models.draft_heads.{DRAFT_HEADS[config.architecture]}").FAMILY
    return family(config.architecture)
