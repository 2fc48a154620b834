"""Heads with random weights, for tests, in the published layouts; and what they should draft."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compiled_llm import SamplingParams
from compiled_llm.step.sampling import SamplingInput, sample

HEAD_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 112,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 307,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def eagle3_tensors(
    seed: int = 0, *, draft_vocab: int = 307, taps: int = 3, config: Mapping[str, Any] = HEAD_CONFIG
) -> dict[str, Tensor]:
    """Tensors of a head by the names of the authors' layout."""
    generator = torch.Generator().manual_seed(seed)
    c = config
    d, heads, kv_heads, h = (c[x] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 2

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(d, taps * d),
        "midlayer.self_attn.q_proj.weight": matrix(heads * h, 2 * d),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * h, 2 * d),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * h, 2 * d),
        "midlayer.self_attn.o_proj.weight": matrix(d, heads * h),
        "midlayer.mlp.gate_proj.weight": matrix(c["intermediate_size"], d),
        "midlayer.mlp.up_proj.weight": matrix(c["intermediate_size"], d),
        "midlayer.mlp.down_proj.weight": matrix(d, c["intermediate_size"]),
        "norm.weight": norm(d),
        "lm_head.weight": 2 * matrix(draft_vocab, d),
    }
    tensors |= {f"midlayer.{x}.weight": norm(d) for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if draft_vocab < c["vocab_size"]:
        ids = torch.randperm(c["vocab_size"], generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(c["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_head(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def write_eagle3(directory: Path, target: Path) -> str:
    """A head of random weights for the checkpoint ``target``, whose embedding and head it shares."""
    of_target = json.loads((target / "config.json").read_text())
    count = of_target["num_hidden_layers"]
    config = HEAD_CONFIG | {name: of_target[name] for name in ("hidden_size", "vocab_size")}
    tensors = eagle3_tensors(config=config, draft_vocab=config["vocab_size"])
    del tensors["lm_head.weight"]
    return write_head(directory, {**config, "eagle_aux_hidden_state_layer_ids": [count - 2, count - 1, count]}, tensors)


def write_medusa(directory: Path, target: Path) -> str:
    """Heads of random weights for the checkpoint ``target``, whose head makes their logits."""
    size = json.loads((target / "config.json").read_text())["hidden_size"]
    return write_head(directory, {"medusa_num_heads": 4, "medusa_num_layers": 1}, medusa_tensors(4, 1, size=size))


class Eagle3Reference:
    """What an EAGLE-3 head drafts, in plain torch and float32: each pass computes all rows anew."""

    def __init__(self, directory: Path, target: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.config = config
        self.layer = config.get("transformer_layer_config", config)
        self.tensors = load_file(directory / "model.safetensors")
        self.prefix = "layers.0" if "transformer_layer_config" in config else "midlayer"
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.head = self.tensors.get("lm_head.weight", self.model.lm_head.weight)
        self.embedding = self.tensors.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        self._seen: dict[int, Tensor] = {}
        self._known: list[tuple[tuple[int, ...], Tensor]] = []  # tokens, and what ``fc`` gives of them
        for number, module in enumerate([*self.model.model.layers, self.model.model.norm]):
            module.register_forward_pre_hook(functools.partial(self._note, number), with_kwargs=True)

    def _note(self, number: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._seen[number] = args[0] if args else kwargs["hidden_states"]

    @torch.no_grad()
    def drafts(
        self, token_ids: Sequence[int], count: int, params: SamplingParams, seed: int, path: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The ``count`` tokens that are drafted after ``token_ids``; the first of them are taken to be ``path``."""
        tokens = list(token_ids)
        features = self._features(tuple(token_ids))[:-1]  # of the last token nothing is known yet
        for number in range(count):
            out = self._rows(features, torch.tensor(tokens[1:]))[-1:]
            normed = self._norm(out, "norm")
            logits = normed @ self.head.T
            if "d2t" in self.tensors:
                every = torch.full((1, self.layer["vocab_size"]), -torch.inf)
                ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
                logits = every.index_copy(1, ids, logits)
            is_given = number < len(path)
            tokens.append(path[number] if is_given else self._sampled(logits, params, seed, len(tokens)))
            features = torch.cat((features, normed if self.config.get("norm_output") else out))
        return tuple(tokens[len(token_ids) :])

    def _features(self, token_ids: tuple[int, ...]) -> Tensor:
        for tokens, features in self._known:
            if tokens[: len(token_ids)] == token_ids:
                return features[: len(token_ids)]
        self.model.model(torch.tensor([token_ids]))
        taken = [self._seen[number][0] for number in self.config["eagle_aux_hidden_state_layer_ids"]]
        if self.config.get("fc_norm"):
            taken = [self._norm(x, f"fc_norm.{number}") for number, x in enumerate(taken)]
        hidden = torch.cat(taken, 1)
        if self.config.get("norm_before_fc"):
            hidden = self._norm(hidden, "input_norm")
        self._known.append((token_ids, hidden @ self.tensors["fc.weight"].T))
        return self._known[-1][1]

    def _rows(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """Outputs ``[T, D]`` of rows of features ``[T, D]`` and the tokens after them."""
        c, name, count = self.layer, self.prefix, len(features)
        embedded = self._norm(self.embedding[token_ids], f"{name}.input_layernorm")
        normed = self._norm(features, f"{name}.hidden_norm")
        x = normed if self.config.get("norm_before_residual", False) else features
        both, h = torch.cat((embedded, normed), 1), c["head_dim"]

        def heads(which: str, number: int) -> Tensor:
            return self._linear(both, f"{name}.self_attn.{which}_proj").view(count, number, h).transpose(0, 1)

        q, k = (
            self._turned(heads(which, c[number]))
            for which, number in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
        )
        v, groups = heads("v", c["num_key_value_heads"]), c["num_attention_heads"] // c["num_key_value_heads"]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2) * h**-0.5).masked_fill(~torch.ones(count, count).tril().bool(), -torch.inf)
        x = x + self._linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")
        y = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self._linear(y, f"{name}.mlp.{which}_proj") for which in ("gate", "up"))
        return x + self._linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def _turned(self, x: Tensor) -> Tensor:
        """Heads ``[N, T, H]``, each turned by its position."""
        count, h = x.shape[1:]
        angles = torch.arange(count)[:, None] * self.layer["rope_theta"] ** (-torch.arange(0, h, 2) / h)
        cos, sin = (f(torch.cat((angles, angles), 1)) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.layer["rms_norm_eps"])

    def _sampled(self, logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
        return sampled_as(logits, params, seed, position)


def sampled_as(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token of ``logits`` [1, V] at ``position`` in a request of these parameters."""
    numbers = params.temperature, params.top_p, params.top_k or logits.shape[1], params.min_p, 0.0, seed, position
    dtypes = *[torch.float32] * 2, torch.int32, *[torch.float32] * 2, torch.int64, torch.int32
    row = (torch.tensor([number], dtype=dtype) for number, dtype in zip(numbers, dtypes, strict=True))
    return int(sample(logits, SamplingInput(*row)))


def medusa_tensors(
    num_heads: int = 3, num_blocks: int = 2, *, bias: bool = True, seed: int = 0, size: int = 112
) -> dict[str, Tensor]:
    """Heads of random weights by the names of the authors' layout, without matrices that make logits."""
    generator = torch.Generator().manual_seed(seed)
    d, tensors = size, {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(d, d, generator=generator) * d**-0.5
            if bias:
                tensors[f"{head}.{block}.linear.bias"] = torch.randn(d, generator=generator) * 0.3
    return tensors


class MedusaReference:
    """What Medusa heads draft, in plain torch and float32; tensors by the names of the authors' layout."""

    def __init__(self, tensors: dict[str, Tensor], num_blocks: int, target: Path) -> None:
        self.tensors, self.num_blocks = tensors, num_blocks
        self._known: list[tuple[tuple[int, ...], Tensor]] = []
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def drafts(self, token_ids: Sequence[int], count: int, params: SamplingParams, seed: int) -> tuple[int, ...]:
        """The ``count`` tokens that are drafted after ``token_ids``, of which the last was sampled in the same step."""
        known = next((hidden for tokens, hidden in self._known if tokens[: len(token_ids)] == tuple(token_ids)), None)
        if known is None:
            known = self.model.model(torch.tensor([list(token_ids)])).last_hidden_state[0]
            self._known.append((tuple(token_ids), known))
        hidden = known[len(token_ids) - 2][None]
        drafts = []
        for head in range(count):
            x = hidden
            for block in range(self.num_blocks):
                weight, bias = (self.tensors.get(f"{head}.{block}.linear.{kind}") for kind in ("weight", "bias"))
                x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
            logits = x @ self.tensors.get(f"{head}.{self.num_blocks}.weight", self.model.lm_head.weight).T
            if "token_map" in self.tensors:
                logits = torch.full((1, HEAD_CONFIG["vocab_size"]), -torch.inf).index_copy(
                    1, self.tensors["token_map"], logits
                )
            drafts.append(sampled_as(logits, params, seed, len(token_ids) + head))
        return tuple(drafts)
