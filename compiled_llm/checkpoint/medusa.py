"""The files of Medusa heads, in the layout of the paper's authors or vLLM's."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.medusa import MedusaConfig
from compiled_llm.models.registry import family_of

_MOST = 64  # heads, and blocks of a head


def medusa_config(config: Mapping[str, Any], names: Collection[str] | None, target: ModelConfig) -> MedusaConfig:
    """What ``config.json`` says, for drafting for the model of ``target``; ``names``: as of ``eagle3_config``.

    Raises:
        ValueError: a field or the model does not allow it.
    """
    of_authors = "medusa_num_heads" in config
    count = _number(config, "medusa_num_heads" if of_authors else "num_heads")
    blocks = _number(config, "medusa_num_layers" if of_authors else "num_hidden_layers")
    for name in ("hidden_size", "vocab_size"):
        if config.get(name) not in (None, getattr(target, name)):
            raise _error(f"{name} must be {getattr(target, name)}, the model's", config[name])
    size = config.get("truncated_vocab_size") or target.vocab_size
    if not isinstance(size, int) or not 0 < size <= target.vocab_size:
        raise _error(f"truncated_vocab_size must be from 1 to {target.vocab_size}", size)
    if of_authors:
        block_names = [[f"{head}.{block}.linear" for block in range(blocks)] for head in range(count)]
        head_names = [f"{head}.{blocks}" for head in range(count)]
    else:
        block_names = [[f"blocks.{head}.layers.{block}" for block in range(blocks)] for head in range(count)]
        head_names = ["lm_head"] if config.get("original_lm_head") else [f"lm_heads.{head}" for head in range(count)]
    names = names if names is not None else [f"{name}.weight" for name in head_names]
    if not any(f"{name}.weight" in names for name in head_names):
        head_names = []
    if not head_names and size != target.vocab_size:
        raise _error("truncated_vocab_size must be left out where heads make no logits of their own", size)
    if not hasattr(family_of(target).describe(target).weights, "final_norm"):
        raise ValueError(
            f"speculative_config: method must be another for {target.architecture}, whose last norm is not within "
            "reach of a drafter"
        )
    common = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)}
    common |= {"architecture": "medusa", "num_layers": 0, "ropes": (), "published": "", "gguf_layout": ""}
    return MedusaConfig(
        **common,
        block_names=tuple(map(tuple, block_names)),
        head_names=tuple(head_names),
        draft_vocab_size=size,
        bias=f"{block_names[0][0]}.bias" in names,
        is_normed=family_of(target).ends_normed,
    )


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 1 <= value <= _MOST:
        raise _error(f"{name} must be from 1 to {_MOST}", value)
    return value


def _error(rule: str, given: Any) -> ValueError:
    return ValueError(f"config.json of speculative_config's model: {rule}, given {given!r:.100}")
