"""Where the scales of a layer's inputs can go: into the norm, or the linear layer, whose output the input is.

Both are found by running a block: a norm whose output only linear layers take, and experts with their router; values
before the output projection, and a gated MLP's "up" before "down". Each is tried with random scales, and kept if the
block's output stays the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.quantizing.experts import Experts

_LARGEST_CHANGE = 1e-3  # relative; what is not exact changes an output by tenths
_BEFORE = (("v_proj", "o_proj"), ("up_proj", "down_proj"))


class Fold(NamedTuple):
    """Input k of ``consumers`` is output ``channels[k]`` of ``producer``, in proportion.

    Attributes:
        producer: name of a norm or a linear layer in the block.
        consumers: names of linear layers and routers.
        channels: ``[K]`` int64; several inputs may come from one output, as with grouped queries.
        offset: what a norm adds to its weights: 1 where it multiplies by ``1 + w``.
    """

    producer: str
    consumers: tuple[str, ...]
    channels: Tensor
    offset: float = 0.0

    def tied(self, of_inputs: Tensor) -> Tensor:
        """``[K]`` with inputs of one output made alike: the largest of them."""
        outputs = torch.zeros(int(self.channels.max()) + 1, dtype=of_inputs.dtype)
        outputs.scatter_reduce_(0, self.channels, of_inputs, "amax")
        return outputs[self.channels]

    def apply(self, block: nn.Module, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide the producer's outputs, multiply the consumers' weights, and return the scales that were used.

        A norm's weights are kept in ``dtype``; scales are then what its rounded weights stand for.
        """
        producer: Any = block.get_submodule(self.producer)
        weight = producer.weight.data
        if isinstance(producer, nn.Linear):
            of_outputs = torch.ones(len(weight), dtype=weight.dtype)
            of_outputs[self.channels] = scales
            weight /= of_outputs[:, None]
        else:
            gain = weight + self.offset
            folded = (gain / scales - self.offset).to(dtype).to(weight.dtype)
            scales = gain / (folded + self.offset)
            useless = ~(scales.isfinite() & (scales > 0))
            folded[useless], scales[useless] = weight[useless], 1.0
            producer.weight.data = folded
            of_outputs = scales
        if getattr(producer, "bias", None) is not None:
            bias = producer.bias.data / of_outputs
            producer.bias.data = bias if isinstance(producer, nn.Linear) else bias.to(dtype).to(weight.dtype)
        for name in self.consumers:
            consumer: Any = block.get_submodule(name)
            scaled = consumer.weight.data * scales
            # A router's weights are not quantised, but written as they are.
            consumer.weight.data = scaled if isinstance(consumer, nn.Linear) else scaled.to(dtype).to(scaled.dtype)
        return scales


def linear_at(block: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a block that has this name."""
    layer = block.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def find_folds(block: nn.Module, run: Callable[[], Tensor]) -> list[Fold]:
    """The folds of a loaded block that leave what ``run`` returns as it is. ``run`` runs the block."""
    before, inputs, outputs = _traced(block, run)
    candidates = []
    for name, (output, of_norm) in outputs.items():
        takers = [n for n, x in inputs.items() if of_norm and _is_same(x, output)]
        consumers = [layer for taker in takers for layer in _layers(block, taker)]
        if consumers and all(_columns(block.get_submodule(n)) == output.shape[-1] for n in consumers):
            channels = torch.arange(output.shape[-1])
            candidates += [Fold(name, tuple(consumers), channels, offset) for offset in (0.0, 1.0)]
    names = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    for first, second in _BEFORE:
        for name in names:
            after = name.removesuffix(first) + second
            if name.endswith(first) and after in names:
                candidates.append(Fold(name, (after,), _channels(block, name, after)))
    found: list[Fold] = []
    inside = tuple(f"{name}." for name, module in block.named_modules() if isinstance(module, Experts))
    for fold in candidates:
        if any(fold.producer == kept.producer for kept in found):
            continue
        # An expert's layers are modules of Expert, and a run may have no token for it.
        if fold.producer.startswith(inside) or _is_exact(fold, block, run, before):
            found.append(fold)
    return found


def _is_same(x: Tensor, output: Tensor) -> bool:
    """Whether ``x`` is ``output``, or all of it in another shape."""
    return x is output or (x.data_ptr() == output.data_ptr() and x.numel() == output.numel())


def _layers(block: nn.Module, taker: str) -> list[str]:
    """The layers that multiply what a module takes: itself, or the first ones of its experts."""
    module = block.get_submodule(taker)
    if not isinstance(module, Experts):
        return [taker]
    return [f"{taker}.{expert}.{layer}" for expert in range(len(module)) for layer in ("gate_proj", "up_proj")]


def _columns(module: nn.Module) -> int | None:
    """Inputs of a linear layer or a router, whose weight is a matrix; None for other modules."""
    weight = getattr(module, "weight", None)
    return weight.shape[1] if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _traced(block: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, tuple]]:
    """The block's output, the input of each module without others in it, and its output with whether it is a norm.

    Experts are one module here.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, tuple[Tensor, bool]] = {}
    handles = []
    inside = tuple(f"{name}." for name, module in block.named_modules() if isinstance(module, Experts))
    for name, module in block.named_modules():
        has_others = any(True for _ in module.children()) and not isinstance(module, Experts)
        if not name or has_others or name.startswith(inside):
            continue

        def hook(m: nn.Module, args: tuple, output: Tensor, name: str = name) -> None:
            if args:
                inputs[name] = args[0]
            outputs[name] = (output, "norm" in type(m).__name__.lower())

        handles.append(module.register_forward_hook(hook))
    try:
        return run(), inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _channels(block: nn.Module, first: str, second: str) -> Tensor:
    """Which output of ``first`` each input of ``second`` is, where heads share keys and values or not."""
    num_inputs, num_outputs = linear_at(block, second).in_features, linear_at(block, first).out_features
    owner: Any = block.get_submodule(first.rpartition(".")[0])
    head = getattr(owner, "head_dim", num_outputs)
    if num_inputs % num_outputs or num_outputs % head:
        return torch.arange(num_inputs) % num_outputs
    heads = torch.arange(num_inputs // head) // (num_inputs // num_outputs)
    return (heads[:, None] * head + torch.arange(head)).flatten()


def _is_exact(fold: Fold, block: nn.Module, run: Callable[[], Tensor], before: Tensor) -> bool:
    names = [fold.producer, *fold.consumers]
    kept = {name: {k: v.clone() for k, v in block.get_submodule(name).state_dict().items()} for name in names}
    generator = torch.Generator().manual_seed(0)
    scales = fold.tied(torch.rand(len(fold.channels), generator=generator) + 0.5)
    fold.apply(block, scales, torch.float32)
    change = (run() - before).norm() / before.norm()
    for name, state in kept.items():
        block.get_submodule(name).load_state_dict(state)
    return bool(change < _LARGEST_CHANGE)
