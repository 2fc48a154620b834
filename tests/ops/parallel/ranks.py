"""Ranks as threads of one process, on one tensor of memory: ops leave the interpreter's lock free while they wait."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from compiled_llm.ops import RankGroup
from compiled_llm.ops.parallel.rank_group import bytes_for


def run_ranks(size: int, function: Callable[[int, RankGroup], Any], piece: int = 1 << 16) -> list[Any]:
    """What ``function(rank, group)`` returns on each rank. ``piece``: bytes that ranks exchange at once."""
    memory = torch.zeros(bytes_for(size, piece), dtype=torch.uint8)
    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(function, rank, RankGroup.of(rank, size, memory)) for rank in range(size)]
        return [run.result(timeout=60) for run in runs]
