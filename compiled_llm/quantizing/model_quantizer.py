"""Quantising a checkpoint, a decoder block at a time: each block's inputs are what quantised blocks before it give."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.checkpoint.stored_tensors import DTYPES
from compiled_llm.checkpoint.writing import CheckpointWriter
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, dequantize
from compiled_llm.quantizing.block_quantizer import (
    Settings,
    check_groups,
    layer_errors,
    quantize_layer,
    replace_weight,
    scale_block,
)
from compiled_llm.quantizing.blocks import BlockCall, BlockModel, run_block
from compiled_llm.quantizing.folding import find_folds, linear_at
from compiled_llm.quantizing.statistics import InputStatistics, collect
from compiled_llm.quantizing.writing import layer_tensors


class Windows(NamedTuple):
    """Hidden states of windows of a text ``[1, T, D]``, and by T the call of each block."""

    hidden: list[Tensor]
    calls: dict[int, list[BlockCall]]

    def run(self, block: nn.Module, index: int) -> None:
        """Let a block's outputs take the place of the hidden states."""
        for place, x in enumerate(self.hidden):
            self.hidden[place] = run_block(block, x, self.calls[x.shape[1]][index])


class Result(NamedTuple):
    """What was done.

    Attributes:
        layers: for each quantised layer its name and, with a text, the tokens that it saw, and its errors
            (``layer_errors``) if there were any.
        rounded: names of the layers of experts that saw too few tokens for the method, and were rounded to nearest.
        ignored: names of the linear layers that stay as they are.
        nbytes: of the written tensors.
    """

    layers: list[dict[str, Any]]
    rounded: list[str]
    ignored: list[str]
    nbytes: int


def quantize_checkpoint(
    model: BlockModel,
    writer: CheckpointWriter,
    settings: Settings,
    text: Windows,
    evaluated: Sequence[Windows] = (),
    progress: Callable[[str], None] = print,
) -> Result:
    """Quantise the linear layers of all decoder blocks, and write the checkpoint.

    Args:
        text: what is calibrated on; without windows for method "rtn" alone.
        evaluated: nothing, or one text twice: run with the weights as they were, and as quantised.

    Raises:
        ValueError: a layer's inputs are no multiple of the group size, or no layer is left, or ``skip`` names none.
    """
    _check_skip(model, settings.skip)
    ignored = [n for n, m in model.model.named_modules() if isinstance(m, nn.Linear) and not n.startswith(model.name)]
    layers: list[dict[str, Any]] = []
    rounded: list[str] = []
    for index in range(len(model.blocks)):
        block, prefix = model.load(index), model.prefix(index)
        names = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        chosen = [name for name in names if not settings.skips(model.stored_name(prefix + name))]
        ignored += _matrices_but(model, index, chosen)
        for name in chosen:
            check_groups(prefix + name, linear_at(block, name).in_features, settings.scheme.form)
        if evaluated:
            evaluated[0].run(block, index)
        codes, found = _quantize_block(block, index, chosen, settings, text, model.dtype)
        layers += [{"name": model.stored_name(prefix + name), **found[name]} for name in chosen]
        few = [model.stored_name(prefix + name) for name in chosen if found[name].get("rounded")]
        rounded += few
        text.run(block, index)
        if evaluated:
            evaluated[1].run(block, index)
        _write_block(model, writer, index, codes, settings)
        model.drop(index)
        said = f", {len(few)} of experts with few tokens rounded to nearest" if few else ""
        progress(f"{prefix.rstrip('.')}: {len(chosen)} layers{said}")
    if not layers:
        raise ValueError("--skip must leave a layer to quantise")
    for name, stored in model.stored.items():
        if not name.startswith(model.name + "."):
            writer.add(stored.name, stored.read())
    return Result(layers, rounded, ignored, writer.finish(settings.scheme.description(["Linear"], ignored)))


def _check_skip(model: BlockModel, skip: Sequence[str]) -> None:
    """``ValueError`` unless each name is part of that of a linear layer of some block."""
    found = [
        model.stored_name(model.prefix(index) + name)
        for index, block in enumerate(model.blocks)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for part in skip:
        if not any(part in name for name in found):
            kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in found)
            raise ValueError(
                f"--skip must have parts of names of linear layers, given {part!r:.200}, which no layer has. Leave it "
                f"out, or choose of (* stands for numbers): {', '.join(kinds):.1000}"
            )


def _quantize_block(
    block: nn.Module, index: int, chosen: list[str], settings: Settings, text: Windows, dtype: torch.dtype
) -> tuple[dict[str, QuantizedRows], dict[str, dict[str, Any]]]:
    """Quantise layers of a block in place. Returns their codes, and with a text their errors."""
    statistics: dict[str, InputStatistics] = {}
    before: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    if text.hidden:

        def run_all() -> None:
            for x in text.hidden:
                run_block(block, x, text.calls[x.shape[1]][index])

        statistics = collect(block, run_all, sum(x.shape[1] for x in text.hidden))
        for name in [name for name in chosen if name in statistics]:
            of = statistics[name]
            before[name] = (linear_at(block, name).weight.data.clone(), of.rows, of.largest.clone())
        if settings.moves_scales:
            first = text.hidden[0]
            folds = find_folds(block, lambda: run_block(block, first, text.calls[first.shape[1]][index]))
            scale_block(block, folds, statistics, set(chosen), settings, dtype)
    codes, errors = {}, dict[str, dict[str, Any]]()
    for name in chosen:
        layer = linear_at(block, name)
        seen = statistics.get(name)
        codes[name] = quantize_layer(layer.weight.data, seen, settings)
        values = dequantize(codes[name], settings.scheme.form)
        errors[name] = {"tokens": 0 if seen is None else seen.count} if text.hidden else {}
        if settings.method != "rtn" and not settings.can_calibrate(seen):
            errors[name]["rounded"] = True
        if seen is not None:
            errors[name] |= layer_errors(*before[name], layer.weight.data, seen.rows, values, settings.scheme)
        replace_weight(layer, values, settings.scheme)
    return codes, errors


def _matrices_but(model: BlockModel, index: int, chosen: list[str]) -> list[str]:
    """What the checkpoint calls the other layers of a block that have a matrix, routers too."""
    layers = {f"{model.prefix(index)}{name}.weight" for name in chosen}
    others = [one for name, one in model.stored.items() if name.startswith(model.prefix(index)) and name not in layers]
    return [one.name.removesuffix(".weight") for one in others if one.name.endswith(".weight") and len(one.shape) == 2]


def _write_block(
    model: BlockModel, writer: CheckpointWriter, index: int, codes: dict[str, QuantizedRows], settings: Settings
) -> None:
    prefix = model.prefix(index)
    parameters = dict(model.blocks[index].named_parameters())
    for name, stored in model.stored.items():
        if not name.startswith(prefix):
            continue
        inner = name.removeprefix(prefix)
        layer = inner.removesuffix(".weight")
        if inner.endswith(".weight") and layer in codes:
            for last, tensor in layer_tensors(codes[layer], settings.scheme).items():
                writer.add(f"{stored.name.removesuffix('.weight')}.{last}", tensor)
        elif inner in parameters:  # scales may have been folded into it
            writer.add(stored.name, parameters[inner].data.to(DTYPES[stored.dtype]))
        else:
            writer.add(stored.name, stored.read())
