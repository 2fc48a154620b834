"""Trees of drafts in the worker: who cannot have them, what a step is told of them, where accepted keys go."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import LayerCache
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.models.registry import attention_layers, layers_of
from compiled_llm.ops import move_keys
from compiled_llm.ops.pinned import on_device
from compiled_llm.scheduling.draft_trees import tree_depths
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, WindowOutput


def check_trees(model_config: ModelConfig, device: torch.device, num_draft_tokens: int, *, exact: bool) -> None:
    """``ValueError`` if so many drafts cannot be a tree there."""
    reason = ""
    layers = layers_of(model_config)
    if device.type != "cpu" and exact:
        reason = "exact=True, and on a GPU a row of a tree has other bits than one of a chain"
    elif not all(isinstance(spec, AttentionSpec) for spec in layers):
        reason = "layers with a state compute tokens one after the other"
    elif device.type != "cpu" and any(0 < spec.window <= num_draft_tokens for spec in attention_layers(layers)):
        reason = f"a window of less than {1 + num_draft_tokens} keys"
    if reason:
        raise ValueError(
            f"speculative_token_tree must be left out for {model_config.architecture} on {device.type!r} ({reason}): "
            "drafts are a chain then"
        )


def with_drafts(
    limits: EngineLimits, num_draft_tokens: int, config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> EngineLimits:
    """``limits`` where so many tokens may be drafted. ``ValueError`` if they are to be trees and cannot be."""
    trees = config.speculation is not None and config.speculation.has_trees
    if trees:
        check_trees(model_config, device, num_draft_tokens, exact=config.exact)
    return limits.with_drafts(num_draft_tokens, one_graph=device.type == "cpu", has_trees=trees)


def tree_rows(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows of a tree with ``parents`` as ``DraftTree`` has them, from the last known token's on.

    Returns:
        How many rows stand before each on its path, int32, and what ``ancestors`` of the attention op has, int64.
    """
    masks = [1]
    for row, parent in enumerate(parents, 1):
        masks.append(masks[parent] | 1 << row)
    return np.array(tree_depths(parents), dtype=np.int32), np.array(masks, dtype=np.uint64).view(np.int64)


def move_accepted(
    output: SchedulerOutput, groups: Sequence[Sequence[LayerCache]], features: Tensor | None = None, *, latent: bool
) -> None:
    """Move the keys that ``output`` says. ``groups``: layers without a window, and those with each.

    ``latent``: their caches are those of latent attention.

    ``features``: ``[B, S, F]``, what a network that drafts keeps of each token, which move as well.
    """
    if features is not None and output.moved_keys:
        source, target = on_device(torch.tensor(output.moved_keys, dtype=torch.int64), features.device).unbind(1)
        rows = features.view(-1, features.shape[2])
        rows[target] = rows[source]
    columns: tuple[SchedulerOutput | WindowOutput, ...] = (output, *output.windows)
    for told, layers in zip(columns, groups, strict=True):
        if told.moved_keys and layers:
            moves = on_device(torch.tensor(told.moved_keys, dtype=torch.int64), layers[0].k.device)
            for cache in layers:
                move_keys(*cache, moves, latent=latent)
