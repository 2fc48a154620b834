"""Quantise a checkpoint on a text, write it, and measure on another text what that did to the model."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.checkpoint.writing import CheckpointWriter
from compiled_llm.quantizing.block_quantizer import Settings
from compiled_llm.quantizing.blocks import BlockModel
from compiled_llm.quantizing.model_quantizer import Result, Windows, quantize_checkpoint
from compiled_llm.quantizing.texts import ROWS_AT_ONCE, Text, Window


class Report(NamedTuple):
    """What was done, and what it did.

    Attributes:
        calibrated_tokens: of the text that was calibrated on.
        quality: of the predictions, see ``quality_of``; empty without a text to evaluate on.
    """

    result: Result
    calibrated_tokens: int
    quality: dict[str, float]


def quantize(
    engine: EngineConfig,
    model: BlockModel,
    output: Path,
    settings: Settings,
    calibration: Text | None,
    evaluation: Text | None,
    progress: Callable[[str], None] = print,
) -> Report:
    """Quantise ``model``, which ``engine`` names, and write it to the directory ``output``.

    Args:
        calibration: None for method "rtn" alone, which needs none.
        evaluation: None: nothing is measured of the predictions.
        progress: gets a line for each block.

    Raises:
        ValueError: a text has too few tokens, ``output`` is not empty, or as ``quantize_checkpoint``.
    """

    def windows_of(text: Text | None) -> list[Window]:
        return [] if text is None else text.windows(engine, model.config, torch.device("cpu"), next_inside=True)

    def embedded(windows: list[Window]) -> Windows:
        """With the token after each at its end."""
        return Windows(*model.embed([torch.cat([window.token_ids, window.targets[-1:]]) for window in windows]))

    text = embedded(windows_of(calibration))
    windows = windows_of(evaluation)
    before = embedded(windows)
    evaluated: Sequence[Windows] = (before, Windows(list(before.hidden), before.calls)) if windows else ()
    writer = CheckpointWriter(checkpoint_directory(engine), output)
    result = quantize_checkpoint(model, writer, settings, text, evaluated, progress)
    calibrated_tokens = sum(x.shape[1] for x in text.hidden)
    return Report(result, calibrated_tokens, quality_of(model, windows, *evaluated) if evaluated else {})


def quality_of(model: BlockModel, windows: Sequence[Window], before: Windows, after: Windows) -> dict[str, float]:
    """Of the quantised model beside the model as it was."""
    losses, kl, agreed, count = torch.zeros(2, dtype=torch.float64), 0.0, 0, 0
    for window, *hidden in zip(windows, before.hidden, after.hidden, strict=True):
        logits, targets = [model.logits(x)[window.first :] for x in hidden], window.targets[window.first :].long()
        for start in range(0, len(targets), ROWS_AT_ONCE):
            wanted = targets[start : start + ROWS_AT_ONCE]
            own, other = (x[start : start + len(wanted)].double().log_softmax(-1) for x in logits)
            losses += torch.stack([F.nll_loss(p, wanted, reduction="sum") for p in (own, other)])
            kl += float(F.kl_div(other, own, reduction="sum", log_target=True))
            agreed += int((own.argmax(-1) == other.argmax(-1)).sum())
        count += len(targets)
    own_loss, loss = (losses / count).tolist()
    return {
        "tokens": count,
        "perplexity": math.exp(own_loss),
        "perplexity_quantised": math.exp(loss),
        "perplexity_change": math.exp(loss - own_loss) - 1,
        "kl_mean": kl / count,
        "top1_agreement": agreed / count,
    }


def in_short(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table: a layer each, but for all experts' together the mean of each number."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        groups.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", layer["name"]), []).append(layer)
    rows: list[dict[str, Any]] = []
    for name, group in groups.items():
        numbers = {key: [layer[key] for layer in group if key in layer] for layer in group for key in layer}
        mean = {key: sum(values) / len(values) for key, values in numbers.items() if key != "name"}
        rows.append(group[0] if len(group) == 1 else {"name": name, **mean})
    return rows
