"""Files of KV blocks for a runner: the key of their folder, and the rows of host memory that are read and written."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.api.config import KV_KEY_VARIABLE, LEAST_KV_KEY, EngineConfig
from compiled_llm.checkpoint.draft_model import DraftCheckpoint
from compiled_llm.models.config import ModelConfig
from compiled_llm.system.hardware import hardware
from compiled_llm.tiers.block_file import HEADER_BYTES
from compiled_llm.tiers.exchange import BlockExchange, hello
from compiled_llm.tiers.file_thread import FileThread
from compiled_llm.tiers.folder import BlockFolder
from compiled_llm.tiers.giver import BlockGiver
from compiled_llm.worker.block_copies import Layout, row_bytes

_PACKAGE = Path(__file__).parents[1]
_SAMPLED, _SAMPLE = 1 << 20, 4096  # of each so many bytes of a file of weights so many are hashed, and its first piece
# Engine arguments that say nothing about what keys and values are.
_OF_NO_MATTER = frozenset(
    [
        "model",
        "revision",
        "tokenizer",
        "tokenizer_revision",
        "split_special_tokens",
        "speculative_config",
        "max_model_len",
        "bucket_sizes",
        "token_bucket_sizes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_kv_blocks",
        "kv_cache_memory_bytes",
        "num_state_slots",
        "gpu_memory_utilization",
        "swap_space_bytes",
        "kv_host_bytes",
        "kv_disk_path",
        "kv_disk_bytes",
        "role",
        "kv_transfer_address",
        "kv_transfer_bytes",
        "kv_transfer_peers",
        "weights_path",
        "weights_bytes",
        "preemption_mode",
        "scheduling_policy",
        "target_itl_ms",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
        "cuda_graphs",
        "compile_workers",
        "wait_for_compile",
        "num_threads",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "max_lora_modules_to_save",
        "lora_target_modules",
        "max_logprobs",
        "max_queued_requests",
        "max_request_id_length",
        "max_grammar_seconds",
        "max_grammar_bytes",
        "logits_transforms",
        "model_process",
        "progress",
        "check_invariants",
        "device",
    ]
)


def open_files(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    exact: str,
    directory: Path,
    drafter: DraftCheckpoint | None,
    device: torch.device,
    layout: Layout,
    pools: Sequence[Tensor],
    last_layer: int | None = None,
) -> FileThread:
    """The files of ``kv_disk_path`` that are this engine's, looked at once; or other engines. See ``folder_key``.

    Args:
        model_config, dtype, exact: as of a ``StartedModel``; directory: of the model.
        layout, pools: as of a ``SwapSpace``; of ranks, those that all have in common.
        last_layer: number of the model's last layer, if blocks have what goes into it for a network that drafts. That
            is for an engine to choose; what else a network reads follows from its config.

    Raises:
        ValueError: there is no key for engines to know each other by, or too short a one; or no room for a file.
    """
    drafters = () if drafter is None else (drafter,)
    facts = model_config, dtype, exact, last_layer, *(one.model_config for one in drafters)
    facts = *facts, *(one.rounded(device, dtype).config.quantization for one in drafters)
    directories = directory, *(one.directory for one in drafters)
    key = folder_key(config, facts, directories, device, layout, any_ranks=config.transfers)
    *of_blocks, state_bytes = map(row_bytes, layout)
    block_bytes = sum(of_blocks)
    if config.transfers:
        return FileThread(_exchange(config, key, block_bytes, state_bytes), HostRows(pools))
    assert config.kv_disk_path is not None
    if config.disk_bytes < (least := sum(HEADER_BYTES + size for size in (block_bytes, state_bytes) if size)):
        what = "a block and a state" if state_bytes else "a block"
        raise ValueError(f"kv_disk_bytes must be at least {least}, {what}, given {config.disk_bytes}")
    folder = BlockFolder(Path(config.kv_disk_path), key, config.disk_bytes)
    folder.scan()
    return FileThread(folder, HostRows(pools))


def _exchange(config: EngineConfig, key: bytes, block_bytes: int, state_bytes: int) -> BlockExchange:
    secret = os.environ.get(KV_KEY_VARIABLE, "")
    if len(secret) < LEAST_KV_KEY:
        raise ValueError(
            f"the environment's {KV_KEY_VARIABLE} must have at least {LEAST_KV_KEY} characters with "
            f"role={config.role!r} and kv_transfer_address={config.kv_transfer_address!r}, given {len(secret)}"
        )
    named: dict[str, Any] = {"model": str(config.model), "dtype": config.dtype, "kv_cache_dtype": config.kv_cache_dtype}
    named |= {"block_size": config.block_size, "block_bytes": block_bytes, "num_threads": torch.get_num_threads()}
    named |= {name: getattr(config, name) for name in ("tensor_parallel_exact", "enable_expert_parallel")}
    giver = None
    if config.kv_transfer_address is not None:
        of_blocks = hello(key, named)
        sizes = block_bytes, config.transfer_bytes, state_bytes
        giver = BlockGiver(config.kv_transfer_address, secret.encode(), of_blocks, *sizes)
    return BlockExchange(key, named, secret.encode(), giver)


def folder_key(
    config: EngineConfig,
    facts: Sequence[Any],
    directories: Sequence[Path],
    device: torch.device,
    layout: Layout,
    *,
    any_ranks: bool = False,
) -> bytes:
    """SHA-256 of all that the bytes of a block depend on, besides what its digest has: adapter, salt and tokens.

    These are the engine's sources, torch, the processor, arguments that change numbers, the files of weights, and how a
    block lies in memory. A file of weights is known by its name, size and time of change, and by a sample of its bytes:
    4 KiB of each MiB.

    Args:
        facts: what else the engine knows of its model.
        directories: of the model and of a network that drafts.
        layout: of a block in all tensors of the KV cache, states included.
        any_ranks: whether engines with more or fewer ranks may have the same key although their bits differ. Those
            with ``tensor_parallel_exact`` always have it: they have the same bits.
    """
    of_no_matter = _OF_NO_MATTER | ({"tensor_parallel_size"} if any_ranks or config.tensor_parallel_exact else set())
    arguments = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in of_no_matter
    }
    machine = hardware(device)
    machine.pop("cpus", None)
    hashed = hashlib.sha256()
    for fact in (arguments, machine, torch.__version__, torch.backends.cpu.get_cpu_capability(), layout, *facts):
        _add(hashed, str(fact).encode())
    sources = sorted(path for kind in ("py", "cpp", "h", "json") for path in _files(_PACKAGE, f".{kind}"))
    for path in sources:
        _add(hashed, str(path.relative_to(_PACKAGE)).encode())
        _add(hashed, path.read_bytes())
    for directory in directories:
        for path in sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".json", ".gguf")):
            _add_weights(hashed, path)
    return hashed.digest()


def _files(directory: Path, suffix: str) -> Iterator[Path]:
    for place, _, names in os.walk(directory, followlinks=True):
        yield from (Path(place) / name for name in names if name.endswith(suffix))


def _add(hashed: Any, data: bytes) -> None:
    hashed.update(len(data).to_bytes(8, "little") + data)


def _add_weights(hashed: Any, path: Path) -> None:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        _add(hashed, f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        _add(hashed, file.read(_SAMPLED))
        for start in range(_SAMPLED, status.st_size, _SAMPLED):
            hashed.update(os.pread(file.fileno(), _SAMPLE, start))


class HostRows:
    """Memory of host blocks, as ``FileThread`` reads and writes it.

    Args:
        pools: those of a ``SwapSpace``: of layers without a window, of those with each, and of those with a state.
    """

    def __init__(self, pools: Iterable[Tensor]) -> None:
        *self._pools, self._states = (pool.numpy() if pool.dim() == 2 else None for pool in pools)

    def __call__(self, row: int) -> tuple[memoryview, Sequence[memoryview]]:
        """``row``: as of a ``HostBlock``."""
        if row < 0:
            assert self._states is not None
            return memoryview(self._states[-row - 1]), ()
        own, *of_windows = (memoryview(b"" if pool is None else pool[row - 1]) for pool in self._pools)
        return own, of_windows
