"""What an engine would say of a model before it starts: from config, tokenizer and headers, without reading weights."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.checkpoint.draft_model import draft_checkpoint
from compiled_llm.checkpoint.generation_config import (
    default_sampling_params,
    listed,
    suggested_sampling,
    warn_of_unserved,
)
from compiled_llm.checkpoint.loader import checked_tensors
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer, model_config, with_end_of_text
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.compiling.compiler import check_torch
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import prefix_of
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.published import rounds_activations
from compiled_llm.models.linears.sharded import Sharding
from compiled_llm.models.quantized.described import described
from compiled_llm.models.registry import code_of, family_of, with_stream
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.models.stages import check_stages
from compiled_llm.models.weights import linear_layers
from compiled_llm.ops import RankGroup
from compiled_llm.step import kv_cache
from compiled_llm.step.drafting import num_draft_layers
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.text.tokenizer_parts import probe_texts
from compiled_llm.worker import exactness
from compiled_llm.worker.device import STEP_DEFAULTS, resolve_device, use_device
from compiled_llm.worker.draft_network import DraftPlan
from compiled_llm.worker.draft_trees import with_drafts
from compiled_llm.worker.mapped_weights import keeping, verified
from compiled_llm.worker.memory import (
    StartMemory,
    check_room_for_weights,
    estimated_activations,
    free_bytes,
    num_bytes,
    total_bytes,
)
from compiled_llm.worker.offloaded_weights import OffloadedWeights, offloaded
from compiled_llm.worker.pool_sizes import PoolSizes, with_state_slots
from compiled_llm.worker.rank_gpus import check_ranks_on_gpus, gpus_of_ranks

_MIB = 2**20

T = TypeVar("T")


def look_at(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """What there is to know of a model and of its room on this machine, as (what, text), a row as soon as it is known.

    The steps are those of an engine's start, up to where that reads weights.

    Raises:
        ValueError: the model cannot be served with ``config``: the engine's own error.
    """
    directory = checkpoint_directory(config, with_weights=False)
    yield "model", config.model or "the bundled model"
    made, notes = _with_notes(lambda: model_config(directory, config.model_impl, config.dtype))
    made = with_stream(made, config.stream)
    yield "family", f"{made.architecture}, by {code_of(made)}"
    yield "sizes", _sizes(made)
    yield from notes
    tokenizer = load_tokenizer(config, directory)
    yield from _of_tokenizer(directory, made, tokenizer)
    if tokenizer is not None:
        made, lines = with_end_of_text(made, tokenizer)
        yield from (("note", line) for line in (*tokenizer.notes, *lines))

    device = resolve_device(config.device)
    check_torch(device, config.enforce_eager)
    dtype = getattr(torch, made.dtype if config.dtype == "auto" else config.dtype)
    cache_dtypes = kv_cache.layer_dtypes(config, dtype, made)
    use_device(device, cache_dtypes, made)
    limits = EngineLimits.resolve(config, made.max_position_embeddings, STEP_DEFAULTS[device.type])
    if config.speculation is not None:
        limits = with_drafts(limits, config.speculation.num_tokens, config, made, device)
    linears = linears_of(config, made, device, dtype)
    own, taken, of_each = _of_rank(config, made, linears, device)
    limits = with_state_slots(limits, config, own, dtype)
    yield from _of_sampling(directory, limits)

    are_mapped = keeping(config, device, linears) is not linears
    network = draft_checkpoint(config, made, tokenizer, with_weights=False)
    drafter = None if network is None else DraftPlan.of(network, made, limits.max_model_len, device, dtype)
    within = "" if drafter is None else prefix_of(drafter.model_config)
    served = dataclasses.replace(made, max_position_embeddings=limits.max_model_len)
    description = family_of(served).describe(served, dtype, taken)
    weight_bytes = num_bytes(description.weights)
    weights, elsewhere, rows = _offloaded(description.weights, offloaded(config, served, device, linears, dtype))
    kept = f", {described(json.loads(made.published), rounds_activations(linears))}" if made.published else ""
    kept += f", rounded to {config.quantization}" if config.quantization is not None else ""
    yield "weights", f"{kv_cache.dtype_name(dtype)}{kept}: {weight_bytes / _MIB:,.1f} MiB in memory{of_each}"
    yield from rows
    weight_bytes = num_bytes(weights) - elsewhere
    if config.model is not None and not Path(config.model).expanduser().is_dir() and not _has_weights(directory):
        yield "files", "the weights were not downloaded from the hub, and their headers not read"
    elif config.load_format != "dummy":
        stored, notes = _with_notes(lambda: checked_tensors(directory, served, description, within))
        if drafter is not None and within:
            checked_tensors(directory, drafter.model_config, drafter.description())
        files = {tensor.path for tensor in stored.values()}
        size = sum(path.stat().st_size for path in files) / _MIB
        yield (
            "files",
            f"{len(files)} of {size:,.1f} MiB together; their tensors have the names and shapes of the family",
        )
        yield from notes
    if are_mapped:
        yield "kept weights", verified(config, made, directory, dtype)
    yield "exact bits", exactness.described(exactness.obstacles(config, device, linears, made))

    draft_bytes = _draft_bytes(drafter, config, made)
    if drafter is not None:
        yield "draft model", _of_drafter(drafter, draft_bytes)
    if num_layers := num_draft_layers(config.speculation, made):
        yield "drafts", f"by the first {num_layers} of {made.num_layers} layers, on the model's weights and KV cache"
    sizes = PoolSizes.of(own, cache_dtypes, limits, dtype, 0 if drafter is None else drafter.token_bytes)
    state = f"; {sizes.slot_bytes:,} bytes of state a request" if sizes.slot_bytes else ""
    yield "KV cache", f"{kv_cache.describe(own, cache_dtypes, dtype)}{state}{of_each}"
    yield "memory", _free(device)
    sharing = 1 if device.type == "cuda" and ":" not in config.device else config.tensor_parallel_size
    how_much = weights, taken, config, served, directory, device, dtype, sharing
    check_room_for_weights(*how_much, are_mapped=are_mapped, elsewhere=elsewhere)
    needed = kv_cache.num_tensors(own, cache_dtypes), estimated_activations(made, limits, dtype, taken)
    memory = StartMemory(config, limits, device, sizes, *needed, config.tensor_parallel_size, sharing)
    mapped = num_bytes(tuple(linear_layers(description.weights))) if are_mapped else 0
    yield "room", _room(memory, limits, made, weight_bytes + draft_bytes, mapped)


def _draft_bytes(drafter: DraftPlan | None, config: EngineConfig, target: ModelConfig) -> int:
    """Of a network's weights, with a copy of the model's head where it makes one."""
    if drafter is None:
        return 0
    copies = not (target.published or config.quantization) and config.tensor_parallel_size == 1
    return num_bytes(drafter.description().weights) + copies * drafter.own_head_bytes


def _of_drafter(drafter: DraftPlan, num_bytes: int) -> str:
    kind = drafter.checkpoint.config.quantization
    rounded = f" rounded to {kind}," if kind is not None else ""
    return (
        f"{drafter.model_config.architecture},{rounded} {_sizes(drafter.model_config)}; {num_bytes / _MIB:,.1f} MiB in "
        f"memory; KV cache {drafter.describe_cache()}"
    )


def _offloaded(weights: Any, offload: OffloadedWeights | None) -> tuple[Any, int, list[tuple[str, str]]]:
    """Described weights as a step takes them, bytes of these in host memory, and what there is to say of that."""
    if offload is None:
        return weights, 0, []
    weights = offload.over_buffers(weights, torch.device("meta"))
    offload.check_room()
    said = (
        f"{offload.host_bytes / _MIB:,.1f} MiB of these, {len(offload.kind.layers)} layers, in host memory; they come "
        f"to buffers of {offload.buffer_bytes / _MIB:,.1f} MiB on the device"
    )
    return weights, offload.host_bytes, [("offloaded weights", said)]


def _of_rank(
    config: EngineConfig, made: ModelConfig, linears: LinearKind, device: torch.device
) -> tuple[ModelConfig, LinearKind, str]:
    """The config and the layers of the first of several ranks, and words for "of each"; those given and "" for one."""
    size = config.tensor_parallel_size
    if device.type == "cuda" and (config.num_processes > 1 or config.tensor_parallel_exact):
        check_ranks_on_gpus(config)
        gpus_of_ranks(config.device, size)
    if config.pipeline_parallel_size > 1:
        check_stages(made, config.pipeline_parallel_size)
    if size == 1 and not config.tensor_parallel_exact:
        return made, linears, ""
    shard = Shard(0, size, config.tensor_parallel_exact, config.enable_expert_parallel)
    of_each = f" of each of {size} ranks" if size > 1 else ""
    return rank_config(made, shard), Sharding(linears, shard, RankGroup.alone()), of_each


def _free(device: torch.device) -> str:
    where = "GPU" if device.type == "cuda" else "machine"
    return f"{free_bytes(device) / 2**30:,.1f} GiB of the {where}'s {total_bytes(device) / 2**30:,.1f} are free"


def _sizes(made: ModelConfig) -> str:
    return (
        f"{made.num_layers} layers, hidden size {made.hidden_size}, {made.num_heads} heads and {made.num_kv_heads} KV "
        f"heads of {made.head_dim}, vocabulary {made.vocab_size:,}, {made.max_position_embeddings:,} positions"
    )


def _with_notes(call: Callable[[], T]) -> tuple[T, list[tuple[str, str]]]:
    """What ``call`` returns, and a row for each of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [("note", str(warning.message)) for warning in caught]


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _of_tokenizer(directory: Path, made: ModelConfig, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    if tokenizer is None:
        yield "tokenizer", "none: it serves prompt_token_ids only"
        return
    templates = ", ".join(tokenizer.chat_templates) or "none"
    names = ", ".join(f"{name} {text!r}" for name, text in tokenizer.named_tokens.items()) or "none"
    differs = any("transformers" in note for note in tokenizer.notes)
    texts = len(probe_texts(tokenizer.special_tokens))
    probed = "see the notes" if differs else f"the tokens of transformers' class, on {texts} texts"
    count = len(tokenizer.vocabulary()[1])
    yield "tokenizer", f"{count:,} tokens; {probed}"
    yield "special tokens", names
    yield "chat template", templates
    if count > made.vocab_size:
        yield "note", f"the tokenizer has {count:,} tokens, and config.json says vocab_size={made.vocab_size:,}"


def _of_sampling(directory: Path, limits: EngineLimits) -> Iterator[tuple[str, str]]:
    suggested: dict[str, Any] = suggested_sampling(directory)
    default_sampling_params(suggested)
    yield "sampling", f"generation_config.json suggests {listed(suggested) or 'nothing'}"
    yield from _with_notes(lambda: warn_of_unserved(directory, limits.max_model_len))[1]


def _room(memory: StartMemory, limits: EngineLimits, made: ModelConfig, to_load: int, mapped: int) -> str:
    """How long a request may be, and how many of the longest ones run at once.

    Args:
        to_load: bytes of weights; mapped: of these, bytes in a file.
    """
    if mapped:
        memory.share_with_mapped(mapped)
    memory.check(to_load - mapped)
    most = memory.longest_request()
    longest = min(most, made.max_position_embeddings)
    fits = f"max_model_len may be up to {longest:,}"
    if limits.stream is not None:
        return f"{fits} in the cache; requests themselves may be longer (sliding_window)"
    if longest < made.max_position_embeddings:
        fits += f", of the model's {made.max_position_embeddings:,}"
    return f"{fits}; room for {most // limits.max_model_len:,} requests of {limits.max_model_len:,} tokens at once"
