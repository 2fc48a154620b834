"""Checkpoints with a layer that guesses the token after the next, and what that layer gives by transformers' layers."""

import copy
import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm import CompiledEngine
from compiled_llm.models.draft_heads.family import head_family
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.ops.torch_settings import own_settings
from tests.draft_heads import sampled_as
from tests.drafting_networks import Drafted
from tests.families import EVERY_CONFIG, checkpoint, strengthened
from tests.models.steps import BLOCK_SIZE, empty_cache, step_input

FAMILIES = ("deepseek-v3", "deepseek-v3-halves", "glm4-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe")


class MtpParts(NamedTuple):
    """What a layer consists of; its norms multiply by these weights."""

    prefix: str
    embedding_norm: Tensor  # [D]
    hidden_norm: Tensor  # [D]
    projection: Tensor  # [D, 2 * D]
    body: transformers.PreTrainedModel  # of one layer, whose last norm is the layer's


@functools.cache
def mtp_parts(name: str) -> MtpParts:
    """Of the config ``name`` of ``tests.families``: seeded and random, in float32."""
    class_name, fields = EVERY_CONFIG[name]
    fields = copy.deepcopy(fields)
    fields |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
    is_qwen = name.startswith("qwen")
    if is_qwen:
        fields["layer_types"] = ["full_attention"]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(5)
    body = strengthened(model_class(model_class.config_class(**fields)).eval())
    d = body.config.hidden_size
    norms = [1 + 0.3 * torch.randn(d) for _ in range(2)]
    prefix = "mtp" if is_qwen else f"model.layers.{EVERY_CONFIG[name][1]['num_hidden_layers']}"
    return MtpParts(prefix, *norms, torch.randn(d, 2 * d) * (2 * d) ** -0.5, body)


def mtp_tensors(name: str) -> dict[str, Tensor]:
    """The same as published."""
    prefix, embedding_norm, hidden_norm, projection, body = mtp_parts(name)
    with tempfile.TemporaryDirectory() as directory:
        body.save_pretrained(directory)
        saved = load_file(Path(directory) / "model.safetensors")
    is_qwen, first = prefix == "mtp", "model.layers.0."
    layer = f"{prefix}.layers.0." if is_qwen else f"{prefix}."
    found = {layer + key.removeprefix(first): value for key, value in saved.items() if key.startswith(first)}
    if is_qwen:
        return found | {
            "mtp.pre_fc_norm_embedding.weight": embedding_norm - 1,
            "mtp.pre_fc_norm_hidden.weight": hidden_norm - 1,
            "mtp.fc.weight": projection,
            "mtp.norm.weight": saved["model.norm.weight"],
        }
    return found | {
        f"{prefix}.enorm.weight": embedding_norm,
        f"{prefix}.hnorm.weight": hidden_norm,
        f"{prefix}.eh_proj.weight": projection,
        f"{prefix}.shared_head.norm.weight": saved["model.norm.weight"],
    }


def write_checkpoint(name: str, directory: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """That of the config ``name`` with ``tensors`` besides, and ``fields`` of ``config.json``."""
    source = checkpoint(name)
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    whole = load_file(source / "model.safetensors") | tensors
    save_file({key: value.contiguous() for key, value in whole.items()}, directory / "model.safetensors")
    return directory


@functools.cache
def mtp_checkpoint(name: str) -> Path:
    """The same in a directory that lives as long as the test run, as a checkpoint of these families is published."""
    tensors = mtp_tensors(name)
    if not name.startswith("qwen"):  # DeepSeek's and GLM's have the model's own once more
        of_model, prefix = load_file(checkpoint(name) / "model.safetensors"), mtp_parts(name).prefix
        tensors[f"{prefix}.embed_tokens.weight"] = of_model["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}.shared_head.head.weight"] = of_model["lm_head.weight"].clone()
    return write_checkpoint(name, Path(tempfile.mkdtemp(prefix="compiled-llm-mtp-")), tensors)


_OUTPUTS = re.compile(r"\.(o_proj|out_proj|down_proj)(\.|$)")  # of all that is added to the stream


def guessing_checkpoint(name: str, directory: Path, share: float, of_feature: float = 0.0) -> Path:
    """One whose layer guesses what the model says, since all layers add little: ``share`` of what they would.

    ``of_feature``: how often the model's hidden state is added to what it guesses by.
    """
    of_model = load_file(checkpoint(name) / "model.safetensors")
    tensors, d = mtp_tensors(name), of_model["model.norm.weight"].shape[0]
    norms = [key for key in tensors if key.endswith(("enorm.weight", "pre_fc_norm_embedding.weight"))]
    projections = [key for key in tensors if key.endswith((".eh_proj.weight", ".fc.weight"))]
    last = [key for key in tensors if key.endswith(("shared_head.norm.weight", "mtp.norm.weight"))]
    (one,), (projection,), (norm,) = norms, projections, last
    tensors[one] = torch.zeros(d) if name.startswith("qwen") else torch.ones(d)
    tensors[projection] = torch.cat([torch.eye(d), of_feature * torch.eye(d)], 1)
    tensors[norm] = of_model["model.norm.weight"].clone()
    every = of_model | tensors
    return write_checkpoint(
        name, directory, {key: value * share if _OUTPUTS.search(key) else value for key, value in every.items()}
    )


def expected_drafts(engine: CompiledEngine, one: Drafted) -> tuple[int, ...]:
    """What is to be drafted after the tokens of ``one``: by the engine's weights, all rows anew in each pass."""
    runner = engine.own_runner
    drafting = runner.steps.drafting
    assert drafting is not None
    model, head = runner.model_config, drafting.network.model_config
    family, weights, tokens = head_family(head), drafting.network.weights, list(one.token_ids)
    table = [list(range(1, len(tokens) // BLOCK_SIZE + 3))]
    with torch.no_grad(), own_settings():
        known = tokens[:-1]
        step, specs = step_input([(known, 0)], table), for_queries(layers_of(model), len(known))
        hidden = family_of(model).forward(runner.steps.weights, step, empty_cache(model, runner.dtype), model, specs)
        features = family.features(weights, hidden, head)
        for position in range(len(tokens), len(tokens) + len(one.drafts)):
            step = step_input([(tokens[1:], 0)], table)._replace(features=features)
            specs = for_queries(layers_of(head), len(features))
            row = family.forward(weights, step, empty_cache(head, runner.dtype), head, specs)[-1:]
            tokens.append(sampled_as(family.head(weights, row, head), one.params, one.seed, position))
            features = torch.cat([features, family.feed_back(weights, row, head)])
    return tuple(tokens[len(one.token_ids) :])


def reference(name: str, embedded: Tensor, features: Tensor) -> Tensor:
    """What the layer gives of embeddings and features ``[T, D]`` of rows from 0 on, ``[T, D]``."""
    parts = mtp_parts(name)
    eps = parts.body.config.rms_norm_eps

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    both = torch.cat([normed(embedded, parts.embedding_norm), normed(features, parts.hidden_norm)], dim=-1)
    with torch.no_grad():
        return parts.body.model(inputs_embeds=(both @ parts.projection.T)[None]).last_hidden_state[0]
