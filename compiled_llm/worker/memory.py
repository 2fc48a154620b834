"""What an engine's memory goes to: measured while it starts, made into the KV pool's size, and kept as a ledger.

The pool comes last: first the weights are loaded, every bucket is compiled and (on a GPU) recorded on a pool of a few
blocks, and what all that holds is measured. The pool then gets a share of what is really left.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.protocol import GroupedLinear, Linear, LinearKind
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import experts, linear_layers, linears, tensors
from compiled_llm.system.resources import free_memory, total_memory
from compiled_llm.worker.pool_sizes import PoolSizes
from compiled_llm.worker.sampling_stage import most_prompt_rows

# Blocks of the pool to compile on, the sink among them. Not fewer: a size of 1 would be compiled in as a constant.
TRIAL_BLOCKS = 3

_MARGIN = 1.5  # of what a step is estimated to take: uncompiled ones were seen to take 1.1 times as much
_OTHERS = "other programs and everything else"
_CUDA_ROUNDING = 2 << 20  # torch's allocator rounds each large tensor up to this
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One use of memory.

    Attributes:
        where: "device" (a GPU's memory), "host" or "disk".
        how: "exact" (the sum of tensors), "measured" (at the start, as the system or the allocator tells it) or
            "estimated" (by arithmetic, where the system cannot be asked).
    """

    name: str
    bytes: int
    where: str
    how: str


@dataclasses.dataclass(frozen=True)
class MemoryLedger:
    """All memory of the machine or the GPU where the model runs, row by row, and what the engine holds elsewhere.

    The rows add up to all the memory there is (on a host to what its container may use, if that is less), whoever uses
    it; the other programs' share is in one of them. ``str()`` of it is a table. The rows:

    - mapped weights: those in a file (``weights_path``) that are to stay in memory, in the page cache, where other
      engines have the same; the others are on the disk (``where``), and read for each step.
    - weights in host memory, buffers of these: the memory that those lie in which come for each step
      (``cpu_offload_gb``), whole pieces of it, and what they come to on the device.
    - weights, adapters' slots, step buffers, KV pool (the sink block included), swap space: the engine's tensors. Of a
      network that drafts, its weights and its KV pool have rows of their own; its buffers are among the others.
    - KV tier: host memory for blocks that leave the prefix cache (``kv_host_bytes``).
    - drafter's text: what a method that drafts from tokens keeps of them, with the KV pool full of requests.
    - compiled code and CUDA graphs: what compiling, recording and loading kernels take for good.
    - activations: what the largest step needs besides. On a GPU the graphs hold it all the time, and what torch's
      allocator rounds up and keeps is counted here; on a CPU it comes and goes.
    - other programs and everything else: all that other processes hold, the operating system, Python and its
      libraries, the CUDA context. It grows and shrinks with what else runs, and says little about the engine.
    - free afterwards: what remains of all memory when the largest step runs and every block of the pool is in use.

    Attributes:
        start_peak_bytes: most host memory this process held, as far as the system's own count (``ru_maxrss``) has
            forgotten it, because measuring the activations started that count anew.
    """

    rows: tuple[MemoryRow, ...]
    where: str
    start_peak_bytes: int

    def with_text_of_drafter(self, size: int) -> "MemoryLedger":
        """This ledger with what a method that drafts on the host keeps of tokens; on a host it is not free any more."""
        rows = []
        for row in self.rows:
            if row.name == "swap space":
                rows.append(MemoryRow("drafter's text", size, "host", "estimated"))
            if row.name == "free afterwards" and self.where == "host":
                row = dataclasses.replace(row, bytes=row.bytes - size)
            rows.append(row)
        return dataclasses.replace(self, rows=tuple(rows))

    @classmethod
    def of_ranks(cls, ledgers: "Sequence[MemoryLedger]", devices: int = 1) -> "MemoryLedger":
        """Of processes that share the memory of one machine, each of which counts a part of what is free as its own.

        ``devices``: GPUs; or 1, also for a host.
        """
        first, total = ledgers[0], ledgers[0].total * devices
        names = [row.name for row in first.rows if row.name != _OTHERS]
        own = {name: sum(ledger.bytes_of(name) for ledger in ledgers) for name in names}
        own[_OTHERS] = total - sum(own[row.name] for row in first.rows if row.where == first.where and row.name in own)
        rows = tuple(dataclasses.replace(row, bytes=own[row.name]) for row in first.rows)
        return cls(rows, first.where, sum(ledger.start_peak_bytes for ledger in ledgers))

    def bytes_of(self, name: str) -> int:
        """Bytes of the row ``name``."""
        return next(row.bytes for row in self.rows if row.name == name)

    @property
    def total(self) -> int:
        """All memory of the machine or GPU where the model runs, used or not. The rows there sum up to it."""
        return sum(row.bytes for row in self.rows if row.where == self.where)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        whole = "total of the GPU" if self.where == "device" else "total of the machine"
        rows = [*self.rows, MemoryRow(whole, self.total, self.where, "")]
        table = [("memory", "MiB", "where", "how")]
        table += [(row.name, f"{row.bytes / 2**20:.1f}", row.where, row.how) for row in rows]
        names, numbers, places, _ = (max(map(len, column)) for column in zip(*table, strict=True))
        return "\n".join(f"{a:<{names}}  {b:>{numbers}}  {c:<{places}}  {d}".rstrip() for a, b, c, d in table)


class StartMemory:
    """The memory of an engine that starts. Made before anything is loaded; then its methods are called in their order.

    The size of the KV pool follows from the first that is given of ``num_kv_blocks``, ``kv_cache_memory_bytes`` and
    ``gpu_memory_utilization``. The share counts, on a GPU, of all its memory; on a CPU, of half the memory free, and
    nothing goes to a pool that ``max_num_seqs`` requests of ``max_model_len`` could not use.

    ``ranks``: processes that start together in the same memory; each has its part of what is free. ``sharing``: those
    that have the same GPU; None: as many.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        device: torch.device,
        pool_sizes: PoolSizes,
        num_cache_tensors: int,
        activation_estimate: int,
        ranks: int = 1,
        sharing: int | None = None,
    ) -> None:
        self._ranks, self._sharing = ranks, ranks if sharing is None else sharing
        self._config, self._limits, self._device = config, limits, device
        self._on_gpu = device.type == "cuda"
        self._pool = pool_sizes
        self._rounding = num_cache_tensors * _CUDA_ROUNDING if self._on_gpu else 0
        self._estimate = activation_estimate
        self._activations = self._compiled = self._set_aside = self._start_peak = 0
        self._activations_are_measured = True
        self._mapped = self._on_disk = 0
        self._before_mapped: tuple[int, int] | None = None  # bytes free, and used by this process
        if self._on_gpu:
            torch.cuda.synchronize(device)  # makes the context, if nothing did before
            torch.cuda.empty_cache()
        self._at_start = self._before_compiling = self._now()
        self._free_for_pool = 0

    def share_with_mapped(self, size: int) -> int:
        """Weights of ``size`` bytes are mapped from a file: how many of them are to stay in memory.

        From now on what this process takes is counted without the pages of files, which come and go.
        """
        config, pool, limits = self._config, self._pool, self._limits
        before = free_memory()
        self._before_mapped = before, _Use.without_files().used
        free = before - self._host_reserve() - int(_MARGIN * self._estimate)
        if config.num_kv_blocks is not None:
            left = free * 7 // 8 - pool.bytes_of(config.num_kv_blocks) - 2 * pool.block_bytes
        elif config.kv_cache_memory_bytes is not None:
            left = free * 7 // 8 - config.kv_cache_memory_bytes
        else:  # a pool takes less than half of what it is left
            left = max(free * 3 // 4, free - 3 * pool.bytes_of(limits.max_num_seqs * limits.blocks_per_request))
        self._mapped = max(0, min(size, left))
        self._on_disk = size - self._mapped
        return self._mapped

    def check(self, to_load: int = 0) -> None:
        """Fail before compiling where there plainly is too little memory, even if compiling and running took none.

        Args:
            to_load: bytes of weights that are not there yet.

        Raises:
            ValueError: with the largest ``max_model_len`` that would fit, by an estimate of what a step takes.
        """
        config, free, block_bytes = self._config, self._free_on_host(), self._pool.block_bytes
        free -= 0 if self._on_gpu else to_load
        for name in ("swap_space_bytes", "kv_host_bytes"):
            if (given := getattr(config, name)) and not block_bytes <= given <= free:
                raise ValueError(
                    f"{name} must be 0 or from {block_bytes} (one block) to {free} (the host memory free), "
                    f"given {given}"
                )
            free -= given
        if self._on_gpu:
            torch.cuda.empty_cache()  # what loading left in torch's allocator
        self._free_for_pool = self._free() - to_load - self._host_reserve()
        self.num_blocks(unmeasured=self._estimate)

    def longest_request(self) -> int:
        """Most tokens of one request for which the pool has room, by what ``check`` found and an estimate of a step."""
        if self._config.num_kv_blocks is not None or self._config.kv_cache_memory_bytes is not None:
            blocks = self.num_blocks()
        else:
            blocks = self._blocks_within(self._share(self._free_for_pool - self._estimate))
        return blocks * self._limits.block_size

    def before_compiling(self) -> None:
        """Weights and step buffers are there."""
        self._before_compiling = self._now()

    def after_compiling(
        self, run_largest: Callable[[], object] | None, *, keeps_graphs: bool, unwritten: int = 0, beside: int = 0
    ) -> None:
        """All buckets are compiled, and recorded on the trial pool.

        Args:
            run_largest: runs a step of each largest bucket; None on a start that has no time for it, whose activations
                are estimated.
            keeps_graphs: whether the CUDA graphs on the trial pool stay when they are recorded on the real one.
            unwritten: bytes of step buffers that take host memory only as they are written, which may be later.
            beside: bytes that the largest step may take on a host besides what ``run_largest`` takes.
        """
        before, now = self._before_compiling, self._now()
        if self._on_gpu:
            # Each graph's function runs once as it is before it is recorded. What that took is free again now, and
            # taken again for a while as the graphs are recorded on the real pool.
            torch.cuda.empty_cache()
            passing, now = now.used, self._now()
            graphs = max(0, now.used - before.used) if keeps_graphs else 0
            self._set_aside = max(0, passing - now.used) + graphs
        self._compiled = max(0, now.outside_allocator - before.outside_allocator)
        if not self._on_gpu:
            self._start_peak = _peak_resident_bytes() or 0
            measured = None if run_largest is None else growth_while(run_largest)
            self._activations_are_measured = measured is not None
            estimate = int(_MARGIN * self._estimate) if run_largest is None else self._estimate
            self._activations = estimate if measured is None else measured + beside
        self._free_for_pool = self._free() - self._set_aside - self._activations - self._host_reserve() - unwritten

    def num_blocks(self, unmeasured: int = 0) -> int:
        """Blocks that the KV pool gets, the sink left out.

        Args:
            unmeasured: bytes that may turn out to be needed besides. The pool fails for none of them, but a
                ``max_model_len`` that is named as fitting leaves them free.

        Raises:
            ValueError: too little memory for the size asked for, or for one request of ``max_model_len`` tokens; the
                message names the largest ``max_model_len`` that fits.
        """
        config, limits, pool = self._config, self._limits, self._pool
        most = self._blocks_within(self._free_for_pool)
        if config.num_kv_blocks is not None:
            if config.num_kv_blocks > most:
                raise ValueError(
                    f"num_kv_blocks must be at most {most} (the memory free), given {config.num_kv_blocks}"
                    + self._fitting(self._free_for_pool - unmeasured)
                )
            return config.num_kv_blocks
        if config.kv_cache_memory_bytes is not None:
            blocks = min(pool.blocks_within(config.kv_cache_memory_bytes), pool.useful_blocks)
            if not 1 <= blocks <= most:
                raise ValueError(
                    f"kv_cache_memory_bytes must be from {pool.block_bytes} (one block) to {pool.bytes_of(most)} (the "
                    f"memory free), given {config.kv_cache_memory_bytes}"
                    + (self._fitting(self._free_for_pool - unmeasured) if blocks else "")
                )
            return blocks
        room = self._share(self._free_for_pool)
        blocks = min(self._blocks_within(room), limits.max_num_seqs * limits.blocks_per_request)
        if blocks < limits.blocks_per_request:
            needed = pool.bytes_of(limits.blocks_per_request) + pool.block_bytes
            raise ValueError(
                f"{max(0, room) >> 20} MiB are free for the KV pool, and a request of max_model_len="
                f"{limits.max_model_len} tokens needs {needed >> 20}"
                + self._fitting(self._share(self._free_for_pool - unmeasured))
            )
        return blocks

    def blocks_after_recording(self, num_blocks: int) -> int:
        """Of a pool of ``num_blocks`` on which the graphs are recorded: the blocks for which there really is room.

        Fewer only on a GPU, where the size follows from a share of its memory, and what was recorded takes more of it
        than on the trial pool.

        Raises:
            ValueError: there is no room for one request of ``max_model_len`` tokens.
        """
        config = self._config
        if not self._on_gpu or config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
            return num_blocks
        torch.cuda.empty_cache()  # what the functions took before they were recorded
        left, total = self._share(free_bytes(self._device)), total_bytes(self._device)
        if left >= 0:
            return num_blocks
        room = self._pool.bytes_of(num_blocks) + self._pool.block_bytes + self._rounding + left
        self._free_for_pool = room + total - self._share(total)
        return min(num_blocks, self.num_blocks())

    def ledger(
        self,
        weight_bytes: int,
        buffer_bytes: int,
        pool_bytes: int,
        swap_bytes: int,
        drafter: tuple[int, int] | None = None,
        adapter_bytes: int = 0,
        tier_bytes: int = 0,
        offloaded: tuple[int, int] | None = None,
    ) -> MemoryLedger:
        """What everything came to, now that the pool is there (and on a GPU the graphs are recorded on it).

        ``drafter``: bytes of the weights and of the KV pool of a network that drafts. ``adapter_bytes``: of all slots.
        ``tier_bytes``: of host memory for what leaves the prefix cache. ``offloaded``: bytes of the host memory that
        weights lie in, and of the buffers that they come to.
        """
        of_drafter = sum(drafter or ())
        at_host, of_buffers = offloaded or (0, 0)
        total, held = total_bytes(self._device), weight_bytes + adapter_bytes + buffer_bytes + pool_bytes + of_drafter
        held += of_buffers
        if self._on_gpu:
            before, now = self._before_compiling, self._now()
            compiled = max(0, now.outside_allocator - before.outside_allocator)
            activations = now.reserved - self._at_start.reserved - held
            free = (total - now.used) // self._sharing
        else:
            # Pages of the pool and of the swap space become resident as they are first written.
            compiled, activations, held = self._compiled, self._activations, held + swap_bytes + tier_bytes
            held += at_host
            free = self._free_for_pool - pool_bytes - (0 if drafter is None else drafter[1])
        everything_else = total - free - held - compiled - activations - self._mapped
        where = "device" if self._on_gpu else "host"
        names = ("drafter's weights", "drafter's KV pool")
        drafted = [MemoryRow(name, size, where, "exact") for name, size in zip(names, drafter or (), strict=False)]
        rows = (
            MemoryRow("weights", weight_bytes, where, "exact"),
            *([MemoryRow("mapped weights", self._mapped, where, "exact")] if self._before_mapped else []),
            *([MemoryRow("mapped weights", self._on_disk, "disk", "exact")] if self._on_disk else []),
            *([MemoryRow("weights in host memory", at_host, "host", "exact")] if at_host else []),
            *([MemoryRow("buffers of these", of_buffers, where, "exact")] if at_host else []),
            *([MemoryRow("adapters' slots", adapter_bytes, where, "exact")] if adapter_bytes else []),
            MemoryRow("step buffers", buffer_bytes, where, "exact"),
            MemoryRow("compiled code and CUDA graphs", compiled, where, "measured"),
            MemoryRow("activations", activations, where, "measured" if self._activations_are_measured else "estimated"),
            MemoryRow("KV pool", pool_bytes, where, "exact"),
            *drafted,
            MemoryRow("swap space", swap_bytes, "host", "exact"),
            *([MemoryRow("KV tier", tier_bytes, "host", "exact")] if tier_bytes else []),
            MemoryRow(_OTHERS, everything_else, where, "measured"),
            MemoryRow("free afterwards", free, where, "measured"),
        )
        return MemoryLedger(rows, where, self._start_peak)

    def _share(self, free: int) -> int:
        """How many of the free bytes the pool may take where no size is given."""
        share = self._config.gpu_memory_utilization
        return int(free - (1 - share) * total_bytes(self._device)) if self._on_gpu else int(free * 0.5 * share)

    def _blocks_within(self, size: int) -> int:
        """Blocks of a pool of ``size`` bytes, its sink left out."""
        return self._pool.blocks_within(size - self._rounding - self._pool.block_bytes)

    def _fitting(self, size: int) -> str:
        """What to do about a pool of ``size`` bytes that cannot hold one request of ``max_model_len`` tokens."""
        blocks, block_size = self._blocks_within(size), self._limits.block_size
        if blocks >= self._limits.blocks_per_request:
            return ""
        return f". Lower max_model_len to {blocks * block_size} or less" if blocks else ". Free some memory"

    def _host_reserve(self) -> int:
        """Swap space and tier on a CPU come out of the same memory as the pool."""
        return 0 if self._on_gpu else self._config.swap_space_bytes + self._config.kv_host_bytes

    def _free(self) -> int:
        return free_bytes(self._device) // self._sharing if self._on_gpu else self._free_on_host()

    def _free_on_host(self) -> int:
        """Host memory free; of what mapped weights are to have of it, none."""
        if self._before_mapped is None:
            return free_memory() // self._ranks
        free, used = self._before_mapped
        return free - self._mapped - (_Use.without_files().used - used)

    def _now(self) -> "_Use":
        if self._before_mapped is not None:
            return _Use.without_files()
        if not self._on_gpu:
            return _Use(psutil.Process().memory_info().rss, 0)
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return _Use(total - free, torch.cuda.memory_reserved(self._device))


@dataclasses.dataclass(frozen=True)
class _Use:
    """Bytes in use at one moment: on a CPU by this process; on a GPU by all, ``reserved`` of them by torch here."""

    used: int
    reserved: int

    @classmethod
    def without_files(cls) -> "_Use":
        """Of this process, the pages of files left out."""
        memory = psutil.Process().memory_info()
        return cls(memory.rss - memory.shared, 0)

    @property
    def outside_allocator(self) -> int:
        return self.used - self.reserved


def estimated_activations(
    model_config: ModelConfig, limits: EngineLimits, dtype: torch.dtype, linears: LinearKind
) -> int:
    """Bytes that the largest step holds besides weights and cache, about.

    Logits, of what is sampled or of prompts, and what goes into and comes out of the linear layers of the widest layer.
    """
    weights = family_of(model_config).describe(model_config, dtype, linears).weights
    per_token = max(sum(map(_width, linear_layers(layer))) for layer in weights.layers)
    rows = limits.most_decode_tokens * len(limits.decode_bucket_sizes)
    rows = max(rows, most_prompt_rows(limits, model_config.vocab_size))
    return limits.token_bucket_sizes[-1] * per_token * dtype.itemsize + rows * model_config.vocab_size * 16


def _width(linear: Linear | GroupedLinear) -> int:
    """Elements of a token that go into a linear layer, and come out."""
    return (linear.in_features + linear.out_features) * (linear.top_k if isinstance(linear, GroupedLinear) else 1)


def num_bytes(tree: Any) -> int:
    """Bytes of all tensors in nested tuples."""
    return sum(tensor.nbytes for tensor in tensors(tree))


def check_room_for_weights(
    weights: Any,
    kind: LinearKind,
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int = 1,
    *,
    are_mapped: bool = False,
    elsewhere: int = 0,
    beside: int = 0,
) -> None:
    """``ValueError`` where the weights of ``directory`` cannot be loaded into the memory that is free.

    Args:
        weights: a description of them, on the device "meta"; ``kind``: of their linear layers.
        ranks: processes that load as much each.
        are_mapped: linear layers lie in a file, where each is put when it is made.
        elsewhere: bytes of ``weights`` that are put into the memory of the host.
        beside: bytes that are made of the weights of another model besides.
    """
    of_experts = [layer.nbytes // layer.num_experts for layer in experts(weights)]
    largest = max(*of_experts, *(linear.nbytes for linear in linears(weights)))
    needed = num_bytes(weights) + beside - elsewhere + kind.bytes_while_taking(largest) + (largest if elsewhere else 0)
    if are_mapped:
        needed += max(num_bytes(layer) for layer in linear_layers(weights)) - num_bytes(tuple(linear_layers(weights)))
    needed += largest if config.load_format == "dummy" else 0  # a tensor is made as a whole
    if needed > (free := free_bytes(device) // ranks):
        raise ValueError(
            f"{directory / 'config.json'}: the weights need {needed >> 20} MiB in {str(dtype)[6:]}, "
            f"{num_bytes(weights.ropes) >> 20} of them for max_model_len={model_config.max_position_embeddings}, and "
            f"{free >> 20} are free on {device}: choose a smaller model, a shorter dtype, a smaller max_model_len or "
            "another device"
        )


def free_bytes(device: torch.device) -> int:
    """Memory free where the model runs; on a host, of what the container may use."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def total_bytes(device: torch.device) -> int:
    """All memory where the model runs, used or free; on a host, what the container may use of it."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()


def _peak_resident_bytes() -> int | None:
    """Most host memory this process held, since the start or the last reset; None where the system does not tell."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def growth_while(run: Callable[[], object]) -> int | None:
    """How far host memory rises above what is held now, at its highest while ``run`` runs; None if it cannot be told.

    Linux counts the highest since the last reset, which is a 5 written to ``clear_refs``.
    """
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return None
    before = _peak_resident_bytes()
    run()
    after = _peak_resident_bytes()
    # Linux counts pages roughly, so that what grew by nothing may look smaller by some.
    return None if before is None or after is None else max(0, after - before)
