"""Requests that end here and go on in another engine, their KV blocks included, with the same tokens."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.engine.core import EngineCore
from compiled_llm.engine.transfers import Transfers
from compiled_llm.models.config import ModelConfig
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.worker.tier_files import folder_key


def hand_over(
    core: EngineCore, transfers: Transfers | None, names: Sequence[str], seconds: float
) -> dict[str, tuple[list[int], dict[str, Any] | None]]:
    """End the requests of these names, and lay their blocks ready. See ``StepEngine.hand_over``."""
    entries = {name: core.entries[name] for name in names if not core.entries[name].is_finished}
    counts = {name: len(entry.requests[0].output_token_ids) for name, entry in entries.items()}
    core.drain()  # tokens that come now are sampled again elsewhere
    tiers, end = core.scheduler.tiers, time.monotonic() + seconds
    if transfers is not None and transfers.exchange.giver is not None and tiers is not None:
        for name, entry in entries.items():
            request = entry.requests[0]
            if request.num_published_blocks:
                transfers.give(name, request.block_digests[: request.num_published_blocks])
        for name in entries:
            while time.monotonic() < end and not transfers.has_given(name, tiers):
                core.move_blocks()
    found = {}
    for name, entry in entries.items():
        tokens = entry.requests[0].output_token_ids[: counts[name]]
        core.abort(entry)
        found[name] = tokens, None if transfers is None else transfers.end(name, is_served=True)
    return found


def token_key(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    num_threads: int,
    tokenizer: bytes,
    steps_at_once: int = 1,
) -> str:
    """Of all that tokens and their texts depend on besides their request: engines with the same key give the same.

    How many tokens a request may have is left out. ``num_threads``: the engine's, of all its ranks and of
    ``steps_at_once`` stages; ``tokenizer``: the library's, as JSON.
    """
    facts = model_config, config.split_special_tokens, tokenizer
    # Numbers depend on how many threads a process has.
    with own_settings(num_threads // (config.tensor_parallel_size * steps_at_once)):
        return folder_key(config, facts, [checkpoint_directory(config)], device, ()).hex()
