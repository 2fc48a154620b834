"""The parts of an engine that are made from its arguments: the model's files, the tokenizer and the scheduler."""

import dataclasses
import os
from pathlib import Path

from compiled_llm.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.worker.loader import model_directory
from compiled_llm.worker.runner import ModelRunner

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


def checkpoint_directory(config: EngineConfig) -> Path:
    """Where the files of the model lie; a hub's model is downloaded unless it was before.

    Raises:
        ValueError: there is no such model.
    """
    return DEMO_MODEL if config.model is None else model_directory(config.model, config.revision)


def has_tokenizer(config: EngineConfig, directory: Path) -> bool:
    """Whether prompts may be text. Costs nothing, so a program can ask before it starts an engine."""
    return config.tokenizer is not None or os.path.lexists(directory / "tokenizer.json")


def load_tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    """The tokenizer that ``config`` names, else that of the model in ``directory``; None where it has none."""
    if not has_tokenizer(config, directory):
        return None
    if config.tokenizer is not None:
        return Tokenizer(model_directory(config.tokenizer, config.tokenizer_revision, "tokenizer"))
    return Tokenizer(directory)


def make_scheduler(config: EngineConfig, model_config: ModelConfig, runner: ModelRunner) -> Scheduler:
    """An empty scheduler for the sizes of ``runner`` and its pools of blocks."""
    pool = BlockPool(runner.num_blocks)
    # What a block's content depends on besides its tokens.
    facts = (
        str(model_config),
        str(runner.dtype),
        str(runner.cache_dtypes),
        str(config.model),
        str(config.seed),
    )
    return Scheduler(
        runner.limits,
        pool,
        prefix_cache=PrefixCache(pool, runner.limits.block_size, enabled=config.enable_prefix_caching, facts=facts),
        swap_pool=BlockPool(runner.num_swap_blocks),
        preemption_mode=config.preemption_mode,
        policy=config.scheduling_policy,
        target_itl_ms=config.target_itl_ms,
        costs=dataclasses.replace(runner.costs, bucket_seconds=dict(runner.costs.bucket_seconds)),
    )
