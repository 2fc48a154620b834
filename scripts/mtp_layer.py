"""A multi-token prediction layer of the demo model, as `train_heads.py` trains it, and the checkpoint that has it.

Qwen3 is published without such a layer. GLM-4.5's architecture (`Glm4MoeForCausalLM`) has one, and computes what Qwen3
does where all layers are dense, heads have norms and positions turn all of a head. So the checkpoint has the demo
model's tensors under that architecture, and the layer behind the last one in number.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import own_checkout
import medusa_heads
import torch
import torch.nn.functional as F
import train_demo_model as demo
from draft_attention import attended, of_row_before
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

NUM_DRAFTS = medusa_heads.NUM_HEADS  # that it learns to make one after another


class Mtp(nn.Module):
    """The layer, with the names of GLM-4.5's below its number; see `models/draft_heads/mtp.py`."""

    def __init__(self, teacher: Qwen3ForCausalLM) -> None:
        super().__init__()
        c, last = teacher.config, teacher.model.layers[-1]
        d, eps = c.hidden_size, c.rms_norm_eps
        self.theta, self.head_dim = c.rope_parameters["rope_theta"], c.head_dim
        self.enorm, self.hnorm = nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        # It begins as the model's last layer over the feature before and the embedding, one added to the other.
        self.eh_proj.weight.data.copy_(torch.cat((0.2 * torch.eye(d), torch.eye(d)), 1))
        for name, module in last.named_children():
            setattr(self, name, copy.deepcopy(module).requires_grad_(True))
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(d, eps)})
        self.shared_head["norm"].weight.data.copy_(teacher.model.norm.weight)

    def go_on_from(self, directory: Path) -> None:
        """Take the weights of the layer of an earlier checkpoint."""
        config = json.loads((directory / "config.json").read_text())
        prefix, tensors = f"model.layers.{config['num_hidden_layers']}.", load_file(directory / "model.safetensors")
        self.load_state_dict({n.removeprefix(prefix): w for n, w in tensors.items() if n.startswith(prefix)})

    def logits(self, teacher: Qwen3ForCausalLM, input_ids: Tensor, hidden: tuple[Tensor, ...]) -> list[Tensor]:
        """Of each draft, logits ``[B, T - 2, V]``: those of row p guess token p + 2.

        ``hidden``: what the layers before each layer gave, and the last one, ``[B, T, D]``.
        """
        features = teacher.model.norm(hidden[-1])[:, :-2]
        embedded = self.enorm(teacher.model.embed_tokens(input_ids[:, 1:-1]))
        found, seen = [], list[tuple[Tensor, Tensor]]()
        for _ in range(NUM_DRAFTS):
            out = self._rows(features, embedded, seen)
            found.append(F.linear(out, teacher.lm_head.weight))
            features = of_row_before(out)
        return found

    def _rows(self, features: Tensor, embedded: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What the head takes and the features of the next rows, ``[B, T, D]``."""
        x, attention = self.eh_proj(torch.cat((embedded, self.hnorm(features)), -1)), self.self_attn
        normed = self.input_layernorm(x)
        q, keys, values = (
            getattr(attention, f"{name}_proj")(normed).unflatten(-1, (-1, self.head_dim)) for name in "qkv"
        )
        q, keys, values = (rows.transpose(1, 2) for rows in (attention.q_norm(q), attention.k_norm(keys), values))
        x = x + attention.o_proj(attended(q, keys, values, self.theta, seen))
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


def is_checkpoint(directory: Path) -> bool:
    """Whether it may be a folder that ``write`` has written."""
    config = directory / "config.json"
    return (
        (directory / "model.safetensors").is_file()
        and config.is_file()
        and "num_nextn_predict_layers" in json.loads(config.read_text())
    )


def write(student: Mtp, teacher: Qwen3ForCausalLM, tensors: dict[str, Tensor], output: Path) -> None:
    """The whole checkpoint: the demo model's files with ``tensors`` of the layer, in its architecture's words."""
    source, number = demo.DEFAULT_OUTPUT, teacher.config.num_hidden_layers
    others = shutil.ignore_patterns("config.json", "model.safetensors", "training.json", "README.md", "prompts.jsonl")
    shutil.copytree(source, output, ignore=others, dirs_exist_ok=True)
    own = {f"model.layers.{number}.{name}": weight for name, weight in tensors.items()}
    save_file(load_file(source / "model.safetensors") | own, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config_of(teacher), indent=1) + "\n")


def config_of(teacher: Qwen3ForCausalLM) -> dict[str, Any]:
    """``config.json`` of the demo model with the layer."""
    c = teacher.config
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
        "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    # There are no experts, but their fields are checked.
    experts = {
        "first_k_dense_replace": c.num_hidden_layers + 1, "n_routed_experts": 1, "n_shared_experts": 1,
        "num_experts_per_tok": 1, "moe_intermediate_size": c.intermediate_size, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **{name: getattr(c, name) for name in same},
        **experts,
        "use_qk_norm": True,
        "rope_parameters": {**c.rope_parameters, "partial_rotary_factor": 1.0},
        "num_nextn_predict_layers": 1,
        "dtype": "bfloat16",
    }
