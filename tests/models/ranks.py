"""Ranks of a model as threads of one process, for tests: their weights, and the logits of steps."""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.linears import adapted
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.sharded import Sharding
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.ops.parallel.rank_group import RankGroup, abort, bytes_for
from tests.families import EVERY_CONFIG
from tests.models.steps import empty_cache, step_logits

CPU = torch.device("cpu")
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
# Of the configs of tests/families.py: what makes them such that ranks can share them. In most, four ranks are more than
# there are heads of keys and values.
SHARED: dict[str, dict[str, Any]] = {name: dict(_HEADS) for name in EVERY_CONFIG} | {
    "llama-biases": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16},
    "gemma4-moe": {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    "gpt2": {"n_head": 8},
    "phi3": {**_HEADS, "hidden_size": 128},
    **{name: {"num_attention_heads": 8, "hidden_size": 128} for name in ("gpt-neox", "gpt-neox-in-turn")},
    **{
        name: {"num_attention_heads": 8, "num_key_value_heads": 8}
        for name in ("deepseek-v3", "deepseek-v3-halves", "deepseek-v2", "mistral4")
    },
    **{
        name: {**_HEADS, "linear_num_value_heads": 8, "linear_num_key_heads": 2}
        for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")
    },
    **{name: {**_HEADS, "mamba_n_heads": 16, "mamba_d_head": 14} for name in ("granite-hybrid", "granite-hybrid-moe")},
    **{name: {**_HEADS, "mamba_num_heads": 16} for name in ("nemotron-h", "nemotron-h-moe")},
}

T = TypeVar("T")


@functools.cache
def config_of(name: str, *changes: tuple[str, Any]) -> ModelConfig:
    """That of a family in ``SHARED``, with ``changes``."""
    class_name, fields = EVERY_CONFIG[name]
    fields = copy.deepcopy({**fields, **SHARED[name], **dict(changes)})
    with tempfile.TemporaryDirectory() as directory:
        config = getattr(transformers, class_name).config_class(**fields)
        config.architectures = [class_name]
        config.save_pretrained(directory)
        return read_config(Path(directory))


def random_weights(config: ModelConfig, kind: LinearKind, dtype: torch.dtype = torch.float32) -> Any:
    """Of a model, or of a rank of it."""
    return loader.dummy_weights(config, dtype, CPU, 7, kind)


def of_ranks(size: int, run: Callable[[RankGroup, int], T]) -> list[T]:
    """What ``run`` gives of each rank's group and number, each in a thread of its own."""
    memory = torch.zeros(bytes_for(size, 1 << 16), dtype=torch.uint8)

    def one(rank: int) -> T:
        try:
            return run(RankGroup.of(rank, size, memory), rank)
        except BaseException:
            abort(memory, rank)
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def rank_logits(
    config: ModelConfig,
    weights: Any,
    shard: Shard,
    steps: Sequence[StepInput],
    dtype: torch.dtype = torch.float32,
    with_slots: bool = False,
) -> Tensor:
    """The logits of all tokens of ``steps``, one after the other; ``with_slots``: every second has adapter 2."""
    own = rank_config(config, shard)
    cache, logits = empty_cache(own, dtype), []
    for step in steps:
        if with_slots:
            slots = torch.arange(len(step.input_ids), dtype=torch.int32) % 2 * 2
            weights = adapted.with_slots(weights, slots)
        logits.append(step_logits(own, weights, step, cache))
    return torch.cat(logits)


def logits_of_ranks(
    config: ModelConfig,
    size: int,
    kind: LinearKind | Callable[[], LinearKind],
    steps: Sequence[StepInput],
    dtype: torch.dtype = torch.float32,
    take: Callable[[ModelConfig, LinearKind, torch.dtype], Any] = random_weights,
    with_slots: bool = False,
    **how: Any,
) -> list[Tensor]:
    """Each rank's.

    Args:
        kind: of layers, or what makes one for each rank.
        how: of ``Shard``.
    """

    def run(group: RankGroup, rank: int) -> Tensor:
        shard = Shard(rank, size, **how)
        own: Any = kind() if inspect.isfunction(kind) else kind
        weights = take(config, Sharding(own, shard, group), dtype)
        return rank_logits(config, weights, shard, steps, dtype, with_slots)

    return of_ranks(size, run)
