"""The files of a network that drafts, a model of the same vocabulary or a head, and whether it can draft for one."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.speculative_config import NETWORK_METHODS, NetworkTree, SpeculativeConfig
from compiled_llm.checkpoint.eagle3 import eagle3_config
from compiled_llm.checkpoint.loader import located
from compiled_llm.checkpoint.medusa import medusa_config
from compiled_llm.checkpoint.model_files import (
    checkpoint_directory,
    has_tokenizer,
    load_tokenizer,
    model_config,
    model_directory,
)
from compiled_llm.checkpoint.mtp import mtp_arguments
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import head_family
from compiled_llm.models.draft_heads.medusa import MedusaConfig
from compiled_llm.models.draft_heads.taps import check_taps
from compiled_llm.models.files import read_json
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.registry import layers_of
from compiled_llm.text.tokenizer import Tokenizer

_ROUNDED = "int8_w8a8"
# Methods whose network reads hidden states -> (config.json, names of tensors or None, the model's) -> its config.
_HEADS: Mapping[str, Callable[[Mapping[str, Any], Collection[str] | None, ModelConfig], ModelConfig]] = {
    "eagle3": eagle3_config,
    "medusa": medusa_config,
}


@dataclasses.dataclass(frozen=True)
class DraftCheckpoint:
    """What a worker loads to draft with.

    Attributes:
        config: engine arguments as they are for the draft model.
        num_tokens: most that it drafts for a request and step.
        tree: what it gives of a tree of drafts; None: they are a chain.
        may_round: whether weights that are plain may be rounded where that makes it faster.
    """

    config: EngineConfig
    model_config: ModelConfig
    directory: Path
    num_tokens: int
    tree: NetworkTree | None = None
    may_round: bool = False

    def rounded(self, device: torch.device, dtype: torch.dtype) -> "DraftCheckpoint":
        """With the quantisation that it has there, see ``SpeculativeConfig.quantization``."""
        if not self.may_round or device.type != "cpu" or dtype == torch.float32 or self.model_config.published:
            return self
        config = dataclasses.replace(self.config, quantization=_ROUNDED, keep_weights_twice=False)
        return dataclasses.replace(self, config=config, may_round=False)


def draft_checkpoint(
    config: EngineConfig,
    target: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    with_weights: bool = True,
) -> DraftCheckpoint | None:
    """The network that ``config.speculative_config`` names; None: its method has none.

    Args:
        target: of the model that is drafted for; ``tokenizer``: its own, if it has one.
        with_weights: False downloads the small files of a hub's model alone.

    Raises:
        ValueError: there is no such model, or it cannot draft for this one; the message says why.
    """
    wanted = config.speculation
    if wanted is None or wanted.method not in NETWORK_METHODS or wanted.method == "layer_skip":
        return None  # by "layer_skip" the model itself drafts
    if wanted.method == "mtp":
        directory = checkpoint_directory(config, with_weights)
        own, found = mtp_arguments(config, target, directory)
        may_round = wanted.quantization is None and own.quantization is None
        return DraftCheckpoint(own, found, directory, wanted.num_tokens, may_round=may_round)
    assert wanted.model is not None
    directory = model_directory(wanted.model, wanted.revision, "speculative_config: model", with_weights)
    own = _own_arguments(config, wanted, target)
    reads_hidden_states, tree = wanted.method in _HEADS, wanted.network_tree
    if reads_hidden_states:
        found = _HEADS[wanted.method](read_json(directory / "config.json"), _tensor_names(directory), target)
        check_taps(target, head_family(found).taps(found))
        if isinstance(found, MedusaConfig):
            tree = _checked_heads(wanted, tree, len(found.block_names))
    else:
        found = model_config(directory, config.model_impl, own.dtype)
        _check_layers(wanted.model, found, config.max_model_len or target.max_position_embeddings)
    if not reads_hidden_states or has_tokenizer(own, directory):
        _check_vocabulary(wanted.model, found, load_tokenizer(own, directory), target, tokenizer)
    return DraftCheckpoint(own, found, directory, wanted.num_tokens, tree, wanted.quantization is None)


def _checked_heads(wanted: SpeculativeConfig, tree: NetworkTree | None, num_heads: int) -> NetworkTree | None:
    """``tree`` of so many heads. ``ValueError`` if a path or chain is longer."""
    name, given = "num_speculative_tokens must be", wanted.num_tokens
    if tree is not None:
        name, given = "speculative_token_tree must have paths of", tree.depth
    if given > num_heads:
        raise ValueError(
            f"speculative_config: {name} at most {num_heads}, the heads of {wanted.model!r}, given {given}"
        )
    return None if tree is None else tree._replace(depth=tree.depth or num_heads)


def _own_arguments(config: EngineConfig, wanted: SpeculativeConfig, target: ModelConfig) -> EngineConfig:
    """Engine arguments as they are for the network."""
    return dataclasses.replace(
        config,
        model=wanted.model,
        revision=wanted.revision,
        tokenizer=None,
        tokenizer_revision=None,
        dtype=target.dtype if config.dtype == "auto" else config.dtype,
        kv_cache_skip_layers=(),
        quantization=None if wanted.quantization == "none" else wanted.quantization,
        quantization_group_size=None,
        quantization_skip=(),
        quantization_head="auto",
        quantization_embedding="none",
        quantization_activations="auto",
        # True might refuse a small draft model.
        compress_weights=False if config.compress_weights is False else None,
        keep_weights_twice=False,  # a small one stays in caches
        sliding_window=None,
        attention_sink_tokens=0,
        num_state_slots=None,
        speculative_config=None,
    )


def _tensor_names(directory: Path) -> Collection[str] | None:
    """Those of its files; None where they were not downloaded. ``ValueError`` where they are pickled."""
    if any(directory.glob("*.safetensors")):
        return located(directory)
    pickled = sorted([*directory.glob("*.pt"), *directory.glob("*.bin")])
    if pickled:
        raise ValueError(
            f"speculative_config: model must have its tensors in safetensors files, given {pickled[0]}. To convert it: "
            "safetensors.torch.save_file(torch.load(PATH, weights_only=True), 'model.safetensors')"
        )
    return None


def _check_layers(name: str, config: ModelConfig, max_model_len: int) -> None:
    """``ValueError`` where a draft model has layers or positions that cannot serve."""
    if any(isinstance(spec, StateSpec) for spec in layers_of(config)):
        raise ValueError(
            f"speculative_config: model must have attention in all layers, given {name!r} ({config.architecture}), "
            "some of whose layers keep a state that no rejected draft could be taken out of"
        )
    if not config.ropes and config.max_position_embeddings < max_model_len:
        raise ValueError(
            f"max_model_len must be at most {config.max_position_embeddings} with the draft model {name!r}, which has "
            f"an embedding for each position, given {max_model_len}"
        )


def _check_vocabulary(
    name: str, config: ModelConfig, tokenizer: Tokenizer | None, target: ModelConfig, of_target: Tokenizer | None
) -> None:
    """``ValueError`` unless a token's id is the same in both. Where one has no tokenizer, the sizes are compared."""
    if tokenizer is None or of_target is None:
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"speculative_config: model must have the vocabulary of the model, {target.vocab_size} tokens, given "
                f"{name!r} with {config.vocab_size}"
            )
        return
    own, others = of_target.tokens(), tokenizer.tokens()
    for token_id in range(max(max(own, default=0), max(others, default=0)) + 1):
        if own.get(token_id) != others.get(token_id):
            raise ValueError(
                f"speculative_config: model must have the vocabulary of the model, given {name!r}: token {token_id} is "
                f"{_shown(others, token_id)} there and {_shown(own, token_id)} here"
            )


def _shown(tokens: Mapping[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "none"
