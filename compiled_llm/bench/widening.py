"""A small Qwen3 as a larger one that says the same: at the cost of the larger shape, with the tokens of the small one.

What drafts are worth depends on a text that repeats itself, which random weights do not write, and on what a step
costs, which a small model does not show. A widened model has both, and nothing is trained:

- Each channel of the hidden state is there several times, so a norm's mean square is that of the small model. The
  weights of norms let the first copy through alone; in projections the rest is random, and multiplies zeros.
- Channel j of a small head is channel ``times * j`` of a larger one, which rotary embeddings turn by the same angle.
  What the larger head's scale takes away, the weight of the query's norm gives back.
- Nothing is added of what the other heads, channels of the MLP and layers compute. The small model's layers have as
  many of these behind each, so that a drafter of the first layers gains nothing by it.

Vocabulary, head and tokenizer are the small model's. In float32 all logits agree but for rounding. Heads that draft
from the model's hidden states are widened with it, and so is a layer for multi-token prediction in its checkpoint
(of GLM-4.5's architecture, `scripts/mtp_layer.py`); a draft model stays as it is.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_MULTIPLES = "hidden_size", "head_dim", "num_hidden_layers"
_LEAST = "intermediate_size", "num_attention_heads", "num_key_value_heads"
_NOISE = 0.02  # standard deviation of the random weights


class Widening:
    """From the sizes of one ``config.json`` to those of another.

    Args:
        small: of the model that is widened.
        large: of the shape, of which the sizes alone are taken.
        dtype: of what is written. In one of 16 bits the query's norms are rounded once more.

    Raises:
        ValueError: the larger shape has no place for the small model.
    """

    def __init__(self, small: Mapping[str, Any], large: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        kinds = [config["model_type"] for config in (small, large)]
        if not (kinds[0] == "qwen3" or _computes_qwen3(small)) or kinds[1] != "qwen3":
            raise ValueError(
                "--widen is for a --model of Qwen3 (dense), or of GLM-4.5's architecture that computes the same (no "
                "layer with experts, use_qk_norm, no attention_bias, rope_parameters with a partial_rotary_factor of "
                f"1), and a shape of Qwen3, given {' and '.join(kinds)}"
            )
        for name in (*_MULTIPLES, *_LEAST):
            if large[name] < small[name] or (name in _MULTIPLES and large[name] % small[name]):
                rule = "a multiple of" if name in _MULTIPLES else "at least"
                raise ValueError(f"--widen: {name} must be {rule} the model's {small[name]}, given {large[name]}")
        groups = [one["num_attention_heads"] / one["num_key_value_heads"] for one in (small, large)]
        if groups[0] != groups[1]:
            raise ValueError(
                f"--widen: {groups[0]:g} heads must share their keys, as in the model, given {groups[1]:g}"
            )
        self._small, self._dtype = small, dtype
        self.sizes = {name: large[name] for name in (*_MULTIPLES, *_LEAST)}
        self._copies, self._head, self._layers = (large[name] // small[name] for name in _MULTIPLES)
        self._noise = torch.Generator().manual_seed(0)

    def model(self, source: Path, target: Path) -> None:
        """Writes the model of the directory ``source`` to the new directory ``target``."""
        weights = load_file(source / "model.safetensors")
        widened = {
            name: weight.repeat(1, self._copies)
            for name, weight in weights.items()
            if name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        widened["model.norm.weight"] = self._norm(weights["model.norm.weight"])
        for number in range(self.sizes["num_hidden_layers"]):
            own, other = divmod(number, self._layers)
            layer = _part(weights, f"model.layers.{own}.")
            found = self._layer(self._unheard(layer) if other else layer)
            widened |= {f"model.layers.{number}.{name}": weight for name, weight in found.items()}
        num_layers = self.sizes["num_hidden_layers"]
        fields: dict[str, Any] = {"layer_types": ["full_attention"] * num_layers}
        if self._small["model_type"] == "glm4_moe":
            fields = {"first_k_dense_replace": num_layers + 1}
            guessing = _part(weights, f"model.layers.{self._small['num_hidden_layers']}.")
            widened |= {f"model.layers.{num_layers}.{name}": w for name, w in self._mtp(guessing).items()}
        self._write(source, target, {**self._small, **self.sizes, **fields}, widened)

    def head(self, source: Path, target: Path) -> None:
        """Writes an EAGLE-3 head (of ``speculators``' layout) or Medusa heads (vLLM's) for the widened model."""
        config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
        if config.get("speculators_model_type") == "eagle3":
            self._write(source, target, self._eagle3_config(config), self._eagle3(weights))
        elif config.get("model_type") == "medusa":
            sizes = {"hidden_size": self.sizes["hidden_size"]}
            self._write(source, target, {**config, **sizes}, {n: self._block(w) for n, w in weights.items()})
        else:
            raise ValueError(
                f"--widen: {source} is neither an EAGLE-3 head in the layout of speculators nor Medusa heads"
            )

    def _mtp(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer that guesses the token after the next, if the checkpoint has it."""
        if not layer:
            return {}
        own = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
        repeated = ("embed_tokens.weight", "shared_head.head.weight")  # the model's, which some checkpoints have again
        widened = self._layer({name: weight for name, weight in layer.items() if name not in (*own, *repeated)})
        embedding_norm, feature_norm, projection = (layer[name] for name in own)
        made = (
            self._norm(embedding_norm),
            # Of a feature the other copies are zeros: the model's last norm, or the layer's, has kept them out.
            self._norm(feature_norm.float() / math.sqrt(self._copies)),
            self._reads(projection, len(projection)).repeat(self._copies, 1),
        )
        return widened | dict(zip(own, made, strict=True))

    def _eagle3(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layer = _part(weights, "layers.0.")
        widened = {f"layers.0.{name}": weight for name, weight in self._layer(layer).items()}
        # There is no norm of the query that could have the scale in it, nor keep other channels out.
        name, rows = "layers.0.self_attn.q_proj.weight", len(layer["self_attn.q_proj.weight"]) * self._head
        scale = self._query_scale(torch.ones(rows // self._head))
        widened[name][:rows] *= scale.to(self._dtype)[:, None]
        # What it reads of the model is not normalised, so copies have to be kept out here.
        small, size = self._small["hidden_size"], self.sizes["hidden_size"]
        fc = torch.zeros(size, weights["fc.weight"].shape[1] // small, size)
        fc[:, :, :small] = weights["fc.weight"].view(small, -1, small).repeat(self._copies, 1, 1)
        return {**widened, "fc.weight": fc.flatten(1), "norm.weight": self._norm(weights["norm.weight"])}

    def _eagle3_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        body = {**config["transformer_layer_config"], **self.sizes, "num_hidden_layers": 1}
        ids = "eagle_aux_hidden_state_layer_ids"
        return {
            **config,
            "transformer_layer_config": body,
            "target_hidden_size": self.sizes["hidden_size"],
            ids: [one * self._layers for one in config[ids]],
        }

    def _block(self, weight: Tensor) -> Tensor:
        """Of Medusa: ``[d, d]`` or ``[d]`` -> ``[D, D]`` or ``[D]``. Input and output have zeros beyond ``d``."""
        size = self.sizes["hidden_size"]
        widened = torch.zeros([size] * weight.ndim)
        if weight.ndim > 1:
            widened[: len(weight)] = self._random(len(weight), size)
        widened[tuple(slice(n) for n in weight.shape)] = weight
        return widened

    # ---- a layer ----------------------------------------------------------------------------------------------------

    def _layer(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes, widened = self.sizes, dict[str, Tensor]()
        head = sizes["head_dim"]
        for name, weight in layer.items():
            kind = name.split(".")[-2]
            if kind == "q_norm":
                widened[name] = self._query_scale(weight)
            elif kind == "k_norm":
                widened[name] = weight.repeat_interleave(self._head)
            elif kind in ("q_proj", "k_proj", "v_proj"):
                heads = sizes["num_attention_heads" if kind == "q_proj" else "num_key_value_heads"]
                widened[name] = self._reads(weight, heads * head, self._head)
            elif kind in ("gate_proj", "up_proj"):
                widened[name] = self._reads(weight, sizes["intermediate_size"])
            elif kind == "o_proj":
                widened[name] = self._adds(weight, sizes["num_attention_heads"] * head, self._head)
            elif kind == "down_proj":
                widened[name] = self._adds(weight, sizes["intermediate_size"])
            else:  # a norm of hidden states
                widened[name] = self._norm(weight)
        return widened

    def _norm(self, weight: Tensor) -> Tensor:
        """``[d]`` -> ``[D]``: the first copy alone."""
        return torch.cat((weight, weight.new_zeros(self.sizes["hidden_size"] - len(weight))))

    def _query_scale(self, weight: Tensor) -> Tensor:
        """``[n]`` -> ``[n * times]``: one of ``times`` channels, and the square root of ``times`` as a factor."""
        widened = torch.zeros(len(weight), self._head)
        widened[:, 0] = weight.float() * math.sqrt(self._head)
        return widened.flatten()

    def _reads(self, weight: Tensor, rows: int, times: int = 1) -> Tensor:
        """``[n, parts * d]`` -> ``[rows, parts * D]``, each row ``times`` times; the rest is random."""
        small, size = self._small["hidden_size"], self.sizes["hidden_size"]
        parts = weight.shape[1] // small
        widened = self._random(rows, parts, size)
        widened[: len(weight) * times, :, :small] = weight.view(-1, parts, small).repeat_interleave(times, 0)
        return widened.flatten(1)

    def _adds(self, weight: Tensor, columns: int, times: int = 1) -> Tensor:
        """``[d, n]`` -> ``[D, columns]``: to all copies, of one of ``times`` columns; nothing of the rest."""
        widened = torch.zeros(self.sizes["hidden_size"], columns)
        widened[:, : weight.shape[1] * times : times] = weight.repeat(self._copies, 1)
        return widened

    def _unheard(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A random layer of such tensors, of which nothing is added."""
        made = {name: torch.ones_like(w) if w.ndim == 1 else self._random(*w.shape) for name, w in layer.items()}
        return made | {
            name: torch.zeros_like(w) for name, w in layer.items() if "o_proj" in name or "down_proj" in name
        }

    def _random(self, *shape: int) -> Tensor:
        return _NOISE * torch.randn(shape, generator=self._noise)

    def _write(self, source: Path, target: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """With the tokenizer and the other small files of ``source``."""
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
        named = str(self._dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps({**config, "dtype": named}, indent=1))
        made = {name: weight.to(self._dtype).contiguous() for name, weight in weights.items()}
        save_file(made, target / "model.safetensors", {"format": "pt"})


def _computes_qwen3(config: Mapping[str, Any]) -> bool:
    """Whether it is a config of GLM-4.5's architecture without experts, whose layers are Qwen3's."""
    return (
        config["model_type"] == "glm4_moe"
        and config.get("first_k_dense_replace", 1) > config["num_hidden_layers"]
        and config.get("use_qk_norm", False)
        and not config.get("attention_bias", False)
        and config.get("rope_parameters", {}).get("partial_rotary_factor") == 1
    )


def _part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
