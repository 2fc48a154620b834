"""PoolSizes: how many bytes a KV pool of some blocks takes, and how many blocks fit into some bytes.

Of layers with a state the pool has a number of slots that does not depend on that of the blocks.
"""

import dataclasses
from collections.abc import Sequence

import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.registry import attention_layers, layers_of
from compiled_llm.scheduling.window_pool import useful_places
from compiled_llm.step.kv_cache import bytes_per_layer, bytes_per_slot, short_windows, split_by_window

_MOST_SLOTS = 2**31  # slots are int32


@dataclasses.dataclass(frozen=True)
class WindowSize:
    """Layers that see ``window`` keys: bytes of a block in them, and the most blocks that they need at once."""

    window: int
    block_bytes: int
    most_places: int


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Layers without a window keep every block; those with one as many of them as all running requests may see.

    Attributes:
        own_block_bytes: of a block in layers without a window.
        most_blocks: more could not be numbered.
        useful_blocks: more would be of no use, where blocks are numbers that take no memory.
        draft_block_bytes: of a block in all that a network which drafts keeps.
        num_slots: of layers with a state, the sink left out; 0: there are none.
        slot_bytes: of a slot in all of these.
    """

    own_block_bytes: int
    windows: tuple[WindowSize, ...]
    most_blocks: int
    useful_blocks: int
    num_slots: int = 0
    slot_bytes: int = 0
    draft_block_bytes: int = 0

    @classmethod
    def of(
        cls,
        model_config: ModelConfig,
        dtypes: Sequence[torch.dtype],
        limits: EngineLimits,
        dtype: torch.dtype,
        draft_token_bytes: int = 0,
    ) -> "PoolSizes":
        """``dtypes``: of each layer's cache; ``dtype``: the model's; ``draft_token_bytes``: a network's."""
        windows = short_windows(model_config, limits.max_model_len)
        own, *others = split_by_window(model_config, windows, bytes_per_layer(model_config, dtypes))
        sizes = [
            WindowSize(window, sum(layers) * limits.block_size, useful_places(window, limits))
            for window, layers in zip(windows, others, strict=True)
        ]
        most = _MOST_SLOTS // limits.block_size - 1
        drafted = draft_token_bytes * limits.block_size
        useful = most if any(own) or drafted else limits.max_num_seqs * limits.blocks_per_request
        slots = limits.num_state_slots, bytes_per_slot(model_config, dtype)
        return cls(sum(own) * limits.block_size, tuple(sizes), most, useful, *slots, drafted)

    @property
    def block_bytes(self) -> int:
        """Of a block that all layers keep."""
        return self.own_block_bytes + self.draft_block_bytes + sum(window.block_bytes for window in self.windows)

    def places(self, num_blocks: int) -> dict[int, int]:
        """Window -> blocks that its layers keep of a pool of ``num_blocks``."""
        return {size.window: min(size.most_places, num_blocks) for size in self.windows}

    def bytes_of(self, num_blocks: int) -> int:
        """Of a pool of ``num_blocks``, the sink block left out, with all slots."""
        places, slots = self.places(num_blocks), (1 + self.num_slots) * self.slot_bytes
        everywhere = num_blocks * (self.own_block_bytes + self.draft_block_bytes)
        return slots + everywhere + sum(w.block_bytes * places[w.window] for w in self.windows)

    def blocks_within(self, size: int) -> int:
        """The most blocks of a pool of ``size`` bytes, the sink left out."""
        low, high = 0, self.most_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_of(middle) <= size else (low, middle - 1)
        return low

    def swapped_within(self, size: int, blocks_per_request: int) -> tuple[int, int]:
        """Blocks and slots of swap space of ``size`` bytes: a slot for each half of the longest request."""
        if not size:
            return 0, 0
        per_request = self.slot_bytes + self.block_bytes * -(-blocks_per_request // 2)
        slots = min(self.num_slots, size // per_request)
        return (size - slots * self.slot_bytes) // self.block_bytes, slots

    def kept_within(self, size: int) -> tuple[int, int]:
        """Blocks and slots of host memory of ``size`` bytes: half of it for states, and a slot a block at most.

        ``ValueError``: there is no room for one of each.
        """
        if not size:
            return 0, 0
        if not self.num_slots:
            return size // self.block_bytes, 0
        slots = min(size // 2 // self.slot_bytes, size // (self.slot_bytes + self.block_bytes))
        if not slots:
            least = max(2 * self.slot_bytes, self.slot_bytes + self.block_bytes)
            raise ValueError(
                f"kv_host_bytes must be 0 or at least {least} for layers with a state (half of it holds states), given "
                f"{size}"
            )
        return (size - slots * self.slot_bytes) // self.block_bytes, slots


def with_state_slots(
    limits: EngineLimits, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
) -> EngineLimits:
    """``limits`` with the slots of a model.

    Raises:
        ValueError: requests would have to wait for slots, or no layer needs any; or no layer has a KV cache.
    """
    model_config = model_config.whole
    if not attention_layers(layers_of(model_config)):
        raise ValueError(f"config.json: {model_config.architecture} must have a layer with attention, given none")
    if not bytes_per_slot(model_config, dtype):
        if config.num_state_slots is not None:
            raise ValueError(
                f"num_state_slots must be None for {model_config.architecture}, whose layers keep no state, given "
                f"{config.num_state_slots}"
            )
        return limits
    least = limits.max_num_seqs + 1
    slots = config.num_state_slots or 2 * limits.max_num_seqs + least
    if slots < least:
        raise ValueError(
            f"num_state_slots must be at least {least} (max_num_seqs and one), given {slots}. Fewer max_num_seqs need "
            "fewer"
        )
    return dataclasses.replace(limits, num_state_slots=slots)
