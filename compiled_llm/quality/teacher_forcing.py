"""Teacher forcing: a model and the same one quantised, run over one text in lock-step, and what is measured of them.

The models run uncompiled, in windows of the model's length and in chunks, so that attention reads what earlier chunks
left in the cache. Measured are

- the KL divergence of the next-token distributions, D(own dtype || quantised), in nats, for every token;
- the perplexity of both, and how often their likeliest tokens agree;
- for outputs inside the model, the Euclidean norm over all tokens of the difference to the same output without
  quantisation, relative to that output's.

In half precision, values that round the other way cost a divergence of their own; ``dtype="float32"`` shows that of the
quantisation alone.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.inputs import KVCache, LayerCache, StateCache, StepInput
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.rounding import Rounding, rounding_of
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import tensors
from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.recurrent.state_rows import StateRows
from compiled_llm.quantizing.texts import ROWS_AT_ONCE, Window
from compiled_llm.step.kv_cache import allocate, layer_dtypes
from compiled_llm.worker.device import resolve_device

BLOCK_SIZE = 16
WORTH_KEEPING = 2.0  # times the mean over the layers
L = TypeVar("L", bound=Hashable)


class BadScaleError(Exception):
    """A scale in the cache is zero or not finite."""


class Model(NamedTuple):
    config: ModelConfig
    weights: Any
    dtype: torch.dtype
    device: torch.device
    rounding: Rounding | None = None  # of weights that were rounded at load


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A quantised model, or one with a quantised cache, against it in its own dtype, over all tokens of a text.

    What a tokenizer puts before it is read and not scored.

    Attributes:
        kl: divergence for each token that is scored, ``[T]`` float64, nats.
        losses: of the next tokens in the model's dtype and quantised, means in nats.
        top1: share of the tokens whose likeliest next token is the same.
        output_errors: of each output that was looked at, the Euclidean norm over all tokens of the difference to the
            same output without quantisation, relative to that output's.
    """

    kl: Tensor
    losses: tuple[float, float]
    top1: float
    output_errors: list[float]


Run = Callable[[Model, KVCache, Tensor, int], tuple[Tensor, list[Tensor]]]
"""As ``run_chunk``: logits, and outputs inside the model that are to be compared."""


def step_input(model: Model, kv_cache: KVCache, token_ids: Tensor, start: int) -> StepInput:
    """A chunk of one request whose first token has position ``start``; it has the cache to itself.

    States are read from slot 1 and written to slot 2, so that a chunk may run twice.
    """
    count, end = len(token_ids), start + len(token_ids)

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=model.device)

    return StepInput(
        input_ids=token_ids,
        positions=tensor(range(start, end)),
        slot_mapping=tensor(range(start, end)),  # block 0 is the window's first
        query_start_loc=tensor([0, count]),
        seq_lens=tensor([end]),
        logits_indices=tensor(range(count)),
        block_table=tensor([range(next(len(cache.k) for cache in kv_cache if isinstance(cache, LayerCache)))]),
        states=StateRows(tensor([1]), tensor([[2]]), tensor([[count]])),
    )


def keep_states(kv_cache: KVCache) -> None:
    """The next chunk goes on from what the last one left."""
    for cache in kv_cache:
        if isinstance(cache, StateCache):
            for states in tensors(cache):
                states[1] = states[2]


def run_chunk(model: Model, kv_cache: KVCache, token_ids: Tensor, start: int) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, V]`` of a chunk whose first token has position ``start``; no outputs inside the model."""
    step, functions = step_input(model, kv_cache, token_ids, start), family_of(model.config)
    with torch.no_grad():
        layers = functions.layers(model.config)
        hidden = functions.forward(model.weights, step, kv_cache, model.config, for_queries(layers, len(token_ids)))
        return functions.head(model.weights, hidden[step.logits_indices], model.config), []


def check_scales(kv_cache: KVCache, start: int, end: int) -> None:
    """``BadScaleError`` if a scale of the tokens at ``start..end - 1`` is zero, negative or not finite."""
    for layer, cache in enumerate(kv_cache):
        if isinstance(cache, StateCache):
            continue
        for name, scale in (("keys", cache.k_scale), ("values", cache.v_scale)):
            if scale is None:
                continue
            written = scale.transpose(1, 2).flatten(0, 1)[start:end]  # [tokens, K]
            bad = ~(written.isfinite() & (written > 0))
            if bad.any():
                token, head = bad.nonzero()[0].tolist()
                raise BadScaleError(
                    f"layer {layer}: the scale of the {name} of token {start + token}, KV head {head}, is "
                    f"{written[token, head].item()}; every scale must be a positive number"
                )


def compare(
    own: Model,
    other: Model,
    dtypes: Sequence[torch.dtype],
    windows: list[Window],
    chunk: int,
    title: str = "windows",
    run: Run = run_chunk,
) -> Comparison:
    """Run ``own``, with a cache in its dtype, and ``other``, with one of ``dtypes``, over the windows in lock-step.

    Args:
        dtypes: of the cache of each layer.
        chunk: tokens of a step.
        title: of the progress bar.

    Raises:
        BadScaleError: a scale in the cache of ``other`` is zero or not finite.
    """
    num_blocks = -(-max(len(window.token_ids) for window in windows) // BLOCK_SIZE)
    own_cache = allocate(own.config, (own.dtype,) * len(dtypes), num_blocks, BLOCK_SIZE, own.device, num_slots=3)
    cache = allocate(other.config, dtypes, num_blocks, BLOCK_SIZE, other.device, num_slots=3)
    kl, losses, agreements = [], [], []
    squares: list[Tensor] = []  # of each chunk, [outputs, 2] float64: of the error, of the output
    for window in tqdm(windows, desc=title, unit="window", disable=None, leave=False):
        for start in range(0, len(window.token_ids), chunk):
            tokens, targets = (part[start : start + chunk] for part in (window.token_ids, window.targets))
            own_logits, own_outputs = run(own, own_cache, tokens, start)
            logits, outputs = run(other, cache, tokens, start)
            check_scales(cache, start, start + len(tokens))
            for states in (own_cache, cache):
                keep_states(states)
            squares.append(_squares(own_outputs, outputs))
            scored = [x[max(0, window.first - start) :] for x in (own_logits, logits, targets.long())]
            agreements.append(scored[0].argmax(-1) == scored[1].argmax(-1))
            for own_part, part, target in zip(*(x.split(ROWS_AT_ONCE) for x in scored), strict=True):
                own_log_probs, log_probs = own_part.double().log_softmax(-1), part.double().log_softmax(-1)
                kl.append(F.kl_div(log_probs, own_log_probs, reduction="none", log_target=True).sum(-1))
                pair = [F.nll_loss(log_p, target, reduction="none") for log_p in (own_log_probs, log_probs)]
                losses.append(torch.stack(pair))
    own_loss, loss = torch.cat(losses, dim=1).mean(1).tolist()
    errors, norms = torch.stack(squares).sum(0).unbind(1)
    return Comparison(
        kl=torch.cat(kl).cpu(),
        losses=(own_loss, loss),
        top1=torch.cat(agreements).double().mean().item(),
        output_errors=(errors / norms).sqrt().tolist(),
    )


def _squares(own_outputs: list[Tensor], outputs: list[Tensor]) -> Tensor:
    pairs = [
        torch.stack([(other.double() - own.double()).square().sum(), own.double().square().sum()]).cpu()
        for own, other in zip(own_outputs, outputs, strict=True)
    ]
    return torch.stack(pairs) if pairs else torch.zeros(0, 2, dtype=torch.float64)


def cache_dtypes(model: Model, engine_config: EngineConfig) -> tuple[torch.dtype, ...]:
    """The dtype of each layer's cache. ``ValueError`` for what the engine would refuse."""
    dtypes = layer_dtypes(engine_config, model.dtype, model.config)
    if model.device.type == "cuda":
        for dtype in dtypes:
            kv_quant.check_capability(dtype, torch.cuda.get_device_capability(model.device))
    return dtypes


def load_model(engine_config: EngineConfig) -> Model:
    """A model with the weights that an engine of these arguments has. ``ValueError`` for what it would refuse."""
    directory = checkpoint_directory(engine_config)
    config, device = read_config(directory), resolve_device(engine_config.device)
    dtype = getattr(torch, config.dtype if engine_config.dtype == "auto" else engine_config.dtype)
    linears = linears_of(engine_config, config, device, dtype)
    weights = loader.load_weights(directory, config, dtype, device, linears)
    return Model(config, weights, dtype, device, rounding_of(linears))


def worth_keeping(kl_alone: Mapping[L, float]) -> list[L]:
    """Of layers -> KL divergence of each alone: those that cause more than twice the mean, in their order."""
    mean = sum(kl_alone.values()) / len(kl_alone)
    return [layer for layer, kl in kl_alone.items() if kl > WORTH_KEEPING * mean]


def summary(comparison: Comparison) -> dict[str, float]:
    own, other = (math.exp(loss) for loss in comparison.losses)
    return {
        "tokens": len(comparison.kl),
        "kl_mean": comparison.kl.mean().item(),
        "kl_p99": comparison.kl.kthvalue(math.ceil(0.99 * len(comparison.kl))).values.item(),
        "kl_max": comparison.kl.max().item(),
        "perplexity": own,
        "perplexity_quantised": other,
        "perplexity_change": other / own - 1,
        "top1_agreement": comparison.top1,
    }


def model_name(engine_config: EngineConfig) -> str:
    """As a report has it: a hub id, or a directory as seen from the working directory."""
    if engine_config.model is not None and not os.path.isdir(engine_config.model):
        return engine_config.model
    return os.path.relpath(checkpoint_directory(engine_config))


def advice(own: str, kept: Sequence[L], ranking: Sequence[L], flags: Callable[[Sequence[L]], str]) -> str:
    """Which layers to keep in the model's ``own`` dtype, and the flags for that; where none is worth it, the first."""
    some = f"Worth keeping in {own}, as each causes more than twice the mean KL:"
    none = f"None is worth keeping in {own}: none causes more than twice the mean KL. The first to keep is"
    return f"{some if kept else none}\n  {flags(kept or ranking[:1])}"
