"""A checkpoint as transformers' model, whose decoder blocks are in memory one at a time, in float32."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from compiled_llm.checkpoint.stored_tensors import DTYPES, CheckpointError, StoredTensor, locate
from compiled_llm.quantizing.experts import module_name, split_experts


class BlockCall(NamedTuple):
    """What a block is called with beside the hidden states: masks and positions of a window."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BlockModel:
    """The model of a checkpoint directory. What is outside its decoder blocks is in memory, in float32.

    Attributes:
        stored: name of a parameter of ``model`` -> tensor in the checkpoint's files, which may call it otherwise.
        blocks: the decoder blocks; their weights are on the device "meta" but between ``load`` and ``drop``.
        name: of the list of blocks, such as "model.layers".
        dtype: of the checkpoint's weights.

    Raises:
        ValueError: the checkpoint is quantised already, or its tensors do not match transformers' model.
    """

    def __init__(self, directory: Path) -> None:
        self.config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if getattr(self.config, "quantization_config", None) is not None:
            raise ValueError(f"{directory}: config.json has a quantization_config; give the model before quantisation")
        self.stored: dict[str, StoredTensor] = {module_name(n): one for n, one in locate(directory).items()}
        with init_empty_weights(include_buffers=False):
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        count = self.config.num_hidden_layers
        lists = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise ValueError(f"{directory}: {type(self.model).__name__} has no list of {count} decoder blocks")
        self.name, self.blocks = lists[0]
        for block in self.blocks:
            split_experts(block, getattr(self.config, "num_experts_per_tok", None) or 1)
        self.model.tie_weights()  # a tied head is no parameter of its own then
        self._take(self.model, "", outside=self.name + ".")
        self.model.tie_weights()
        first = next(stored for name, stored in self.stored.items() if name.startswith(f"{self.name}.0."))
        self.dtype = DTYPES[first.dtype]

    def prefix(self, index: int) -> str:
        """What the names of a block's tensors begin with."""
        return f"{self.name}.{index}."

    def stored_name(self, layer: str) -> str:
        """What the checkpoint calls a layer of ``model``; if it has none of that name, as ``model`` does."""
        stored = self.stored.get(f"{layer}.weight")
        return layer if stored is None else stored.name.removesuffix(".weight")

    def load(self, index: int) -> nn.Module:
        self._take(self.blocks[index], self.prefix(index))
        return self.blocks[index]

    def drop(self, index: int) -> None:
        self.blocks[index].to("meta")

    def embed(self, windows: list[Tensor]) -> tuple[list[Tensor], dict[int, list[BlockCall]]]:
        """Hidden states ``[1, T, D]`` of windows of token ids ``[T]``, and by T the call of each block."""
        hidden: list[Tensor] = []
        calls: dict[int, list[BlockCall]] = {}
        for window in windows:
            first: list[Tensor] = []
            of_blocks: list[BlockCall] = []
            self._run(
                self.model.base_model,  # without the head, whose logits may take longer than all blocks
                window,
                lambda x, call, first=first, made=of_blocks: (first.append(x), made.append(call), x)[2],
            )
            hidden.append(first[0])
            calls.setdefault(len(window), of_blocks)
        return hidden, calls

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[T, V]`` of what the last block gave, ``[1, T, D]``."""
        window = torch.zeros(hidden.shape[1], dtype=torch.long)
        return self._run(self.model, window, lambda x, call: hidden).logits[0]

    def _run(self, model: nn.Module, window: Tensor, forward: Any) -> Any:
        """What a model gives for a window, with ``forward(hidden, call)`` in the place of each block."""
        for block in self.blocks:
            block.forward = lambda x, *args, **kwargs: forward(x, BlockCall(args, kwargs))
        try:
            with torch.no_grad():
                return model(window[None].long(), use_cache=False)
        finally:
            for block in self.blocks:
                del block.forward

    def _take(self, module: nn.Module, start: str, outside: str | None = None) -> None:
        """Read the parameters of a module, but not where a name begins with ``outside``."""
        for name, parameter in list(module.named_parameters()):
            if outside is not None and name.startswith(outside):
                continue
            stored = self.stored.get(start + name)
            if stored is None:
                raise CheckpointError(
                    f"{type(self.model).__name__} of transformers has {start + name}, which the checkpoint lacks: "
                    "models whose checkpoints have other names (all experts in one tensor, parts of other models) "
                    "cannot be calibrated"
                )
            if stored.shape != tuple(parameter.shape):
                raise CheckpointError(f"{start + name} has shape {stored.shape}, expected {tuple(parameter.shape)}")
            owner, _, last = name.rpartition(".")
            value = nn.Parameter(stored.read().float(), requires_grad=False)
            setattr(module.get_submodule(owner), last, value)
        for name, buffer in module.named_buffers():  # such as biases of routers
            kept = self.stored.get(start + name)
            if kept is not None and (outside is None or not name.startswith(outside)):
                buffer.copy_(kept.read())


def run_block(block: nn.Module, hidden: Tensor, call: BlockCall) -> Tensor:
    """What a block makes of hidden states ``[1, T, D]``."""
    with torch.no_grad():
        output = block(hidden, *call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output
