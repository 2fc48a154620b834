"""Train heads that draft for the bundled demo model from its hidden states: an EAGLE-3 head, or Medusa heads.

    python scripts/train_heads.py eagle3      # 5 minutes on two CPU cores, into compiled_llm/demo_drafters/eagle3
    python scripts/train_heads.py medusa

Both read the text that the demo model has learned from, and learn what it thinks of the tokens that follow: the loss is
the cross-entropy with its distributions. The EAGLE-3 head learns from its own outputs, too, as it will draft from them
("training-time test", Li et al., 2025, arXiv:2503.01840). Both use the embedding and the head of the demo model, which
are not in their files. Afterwards it is measured on files that neither has seen how often each draft is the demo
model's likeliest token, where the text before it is given. `training.json` keeps the record.
"""

import argparse
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import own_checkout
import torch
import torch.nn.functional as F
import train_demo_model as demo
import train_draft_model as draft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3ForCausalLM

from compiled_llm.api.command_line import FlagParser
from compiled_llm.quantizing.texts import read_source_files, split_files
from compiled_llm.system import hardware as machine

NUM_HEADS = 4  # of Medusa; and drafts that an EAGLE-3 head learns to make one after another
_DECAY = 0.8  # what the next draft counts, as a share of the one before


class Eagle3(nn.Module):
    """A head whose parameters have the names of the layout of `speculators`; see `models/draft_heads/eagle3.py`."""

    def __init__(self, teacher: Qwen3ForCausalLM) -> None:
        super().__init__()
        c = teacher.config
        self.layer_ids = [c.num_hidden_layers // 2, c.num_hidden_layers - 1, c.num_hidden_layers]
        self.sizes = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.theta, self.eps = c.rope_parameters["rope_theta"], c.rms_norm_eps
        d, inner, (n, k, h) = c.hidden_size, 2 * c.hidden_size, self.sizes
        self.intermediate_size = inner
        self.fc = _linear(3 * d, d)
        attention = {"q_proj": _linear(2 * d, n * h), "k_proj": _linear(2 * d, k * h), "v_proj": _linear(2 * d, k * h)}
        mlp = {"gate_proj": _linear(d, inner), "up_proj": _linear(d, inner), "down_proj": _linear(inner, d)}
        layer = {"self_attn": nn.ModuleDict(attention | {"o_proj": _linear(n * h, d)}), "mlp": nn.ModuleDict(mlp)}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        layer |= {name: nn.RMSNorm(d, self.eps) for name in norms}
        self.layers = nn.ModuleDict({"0": nn.ModuleDict(layer)})
        self.norm = nn.RMSNorm(d, self.eps)
        self.norm.weight.data.copy_(teacher.model.norm.weight)

    def config(self, teacher: Qwen3ForCausalLM, num_tokens: int) -> dict[str, Any]:
        """Its `config.json`."""
        c, (n, k, h) = teacher.config, self.sizes
        layer = {
            "model_type": "llama", "hidden_size": c.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1, "num_attention_heads": n, "num_key_value_heads": k, "head_dim": h,
            "vocab_size": c.vocab_size, "hidden_act": "silu", "rms_norm_eps": self.eps, "rope_theta": self.theta,
            "max_position_embeddings": c.max_position_embeddings, "torch_dtype": "bfloat16",
        }  # fmt: skip
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": c.vocab_size,
            "target_hidden_size": c.hidden_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": self.layer_ids,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            },
        }

    def logits(self, teacher: Qwen3ForCausalLM, input_ids: Tensor, hidden: tuple[Tensor, ...]) -> list[Tensor]:
        """Of each draft, logits ``[B, T - 2, V]``: those of row p guess token p + 2.

        ``hidden``: what the layers before each layer gave, ``[B, T, D]``.
        """
        features = self.fc(torch.cat([hidden[number] for number in self.layer_ids], -1))[:, :-2]
        embedded = self.layers["0"]["input_layernorm"](teacher.model.embed_tokens(input_ids[:, 1:-1]))
        found, seen = [], list[tuple[Tensor, Tensor]]()
        for _ in range(NUM_HEADS):
            out = self._rows(features, embedded, seen)
            found.append(F.linear(self.norm(out), teacher.lm_head.weight))
            features = F.pad(out, (0, 0, 1, 0))[:, :-1]  # of the row before
        return found

    def _rows(self, features: Tensor, embedded: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Outputs of rows. Those of pass j see keys of pass 0 up to j rows before, then one of each pass after it."""
        w, (n, k, h), (batch, count, _) = self.layers["0"], self.sizes, features.shape
        both = torch.cat((embedded, w["hidden_norm"](features)), -1)
        q, keys, values = (
            w["self_attn"][f"{name}_proj"](both).view(batch, count, -1, h).transpose(1, 2) for name in "qkv"
        )
        q, keys = self._turned(q), self._turned(keys)
        seen.append((keys.repeat_interleave(n // k, 1), values.repeat_interleave(n // k, 1)))
        j = len(seen) - 1
        first_keys, first_values = seen[0]
        mask = torch.ones(count, count, dtype=torch.bool).tril(-j)
        scores = [(q @ first_keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)]
        later = [_moved(pair, j - number) for number, pair in enumerate(seen[1:], 1)]
        scores += [(q * own_keys).sum(-1, keepdim=True) for own_keys, _ in later]
        shares = (torch.cat(scores, -1) * h**-0.5).softmax(-1)
        seen_values = shares[..., :count] @ first_values
        for place, (_, own_values) in enumerate(later):
            seen_values = seen_values + shares[..., count + place, None] * own_values
        x = features + w["self_attn"]["o_proj"](seen_values.transpose(1, 2).flatten(2))
        y = w["post_attention_layernorm"](x)
        return x + w["mlp"]["down_proj"](F.silu(w["mlp"]["gate_proj"](y)) * w["mlp"]["up_proj"](y))

    def _turned(self, x: Tensor) -> Tensor:
        count, h = x.shape[-2:]
        angles = torch.arange(count)[:, None] * self.theta ** (-torch.arange(0, h, 2) / h)
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _moved(pair: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, N, T, H]``, each of ``by`` rows before."""
    keys, values = (F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]] for x in pair)
    return keys, values


class Medusa(nn.Module):
    """Heads whose parameters have the names of vLLM's layout; see `models/draft_heads/medusa.py`."""

    def __init__(self, teacher: Qwen3ForCausalLM, num_blocks: int = 2) -> None:
        super().__init__()
        d = teacher.config.hidden_size

        def block() -> nn.Linear:
            linear = nn.Linear(d, d)
            nn.init.zeros_(linear.weight)  # so that each head begins as the model's own
            nn.init.zeros_(linear.bias)
            return linear

        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(num_blocks))}) for _ in range(NUM_HEADS)
        )

    def config(self, teacher: Qwen3ForCausalLM, num_tokens: int) -> dict[str, Any]:
        """Its `config.json`."""
        c = teacher.config
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size, "num_heads": num_tokens, "num_hidden_layers": len(self.blocks[0]["layers"]),
            "original_lm_head": True, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def logits(self, teacher: Qwen3ForCausalLM, input_ids: Tensor, hidden: tuple[Tensor, ...]) -> list[Tensor]:
        """Of each head, logits ``[B, T - 2, V]``: those of row p guess token p + 2, as far as its head j can see."""
        normed = teacher.model.norm(hidden[-1])
        found = []
        for number, head in enumerate(self.blocks):
            x = F.pad(normed, (0, 0, number, 0))[:, : normed.shape[1] - 2]  # of `number` rows before
            for linear in head["layers"]:
                x = x + F.silu(linear(x))
            found.append(F.linear(x, teacher.lm_head.weight))
        return found


HEADS = {"eagle3": Eagle3, "medusa": Medusa}


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("method", choices=list(HEADS))
    parser.add_argument("--minutes", type=float, default=5.0, help="wall time of the training loop (default: 5)")
    parser.add_argument("--output", type=Path, help="folder to write (default: that of the bundled one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-files", type=int, help="use only the first so many files, for a quick try")
    parser.add_argument("--context-length", type=int, default=128, help="of what it learns from, a multiple of 4")
    parser.add_argument("--learning-rate", type=float, default=0.002, help="the peak (default: 0.002)")
    args = parser.parse_args(argv)
    args.output = args.output or demo.DEFAULT_OUTPUT.parent / "demo_drafters" / args.method
    rules = {
        "minutes": (0 < args.minutes < math.inf, "a positive number"),
        "max_files": (args.max_files is None or args.max_files >= 10, "10 or more, so that some can be held out"),
        "context_length": (args.context_length >= 16 and args.context_length % 4 == 0, "a multiple of 4, 16 or more"),
        "learning_rate": (0 < args.learning_rate < 1, "above 0 and below 1"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            parser.error(f"--{name.replace('_', '-')} must be {rule}, got {getattr(args, name)}")
    return args


def taught(teacher: Qwen3ForCausalLM, input_ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits ``[B, T - 2, V]`` of the tokens from the third on, and what came before each layer and after the last."""
    hidden = dict[int, Tensor]()
    modules = [*teacher.model.layers, teacher.model.norm]
    hooks = [
        module.register_forward_pre_hook(functools.partial(_note, hidden, number), with_kwargs=True)
        for number, module in enumerate(modules)
    ]
    with torch.no_grad():
        logits = teacher(input_ids=input_ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits[:, 1:-1], tuple(hidden[number] for number in range(len(modules)))


def _note(hidden: dict[int, Tensor], number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    hidden[number] = args[0] if args else kwargs["hidden_states"]


def distance(student: Any, teacher: Qwen3ForCausalLM, input_ids: Tensor) -> Tensor:
    """Cross-entropy of all drafts with the teacher's distributions, in nats, the first counting most."""
    logits, hidden = taught(teacher, input_ids)
    wanted = logits.softmax(-1)
    losses = [
        -(wanted * found.log_softmax(-1))[:, number:].sum() / wanted[:, number:, 0].numel()
        for number, found in enumerate(student.logits(teacher, input_ids, hidden))
    ]
    weights = [_DECAY**number for number in range(len(losses))]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


@torch.no_grad()
def agreement(student: Any, teacher: Qwen3ForCausalLM, windows: Tensor) -> dict[str, list[float]]:
    """On ``windows`` [N, T]: of each draft, how often it is the teacher's likeliest token, and the shared probability.

    The tokens before it are those of the text.
    """
    same, shared, total = torch.zeros(NUM_HEADS), torch.zeros(NUM_HEADS), 0
    for window in windows:
        logits, hidden = taught(teacher, window[None])
        for number, found in enumerate(student.logits(teacher, window[None], hidden)):
            p, q = logits[0, NUM_HEADS:], found[0, NUM_HEADS:]
            same[number] += (p.argmax(-1) == q.argmax(-1)).sum()
            shared[number] += torch.minimum(p.softmax(-1), q.softmax(-1)).sum()
        total += len(p)
    names = ("same_likeliest_token", "shared_probability")
    return {name: [round(float(x / total), 4) for x in sums] for name, sums in zip(names, (same, shared), strict=True)}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    train_files, held_out_files = split_files(read_source_files(args.max_files))
    tokenizer = AutoTokenizer.from_pretrained(demo.DEFAULT_OUTPUT)
    documents = list(demo.encode_files(train_files, tokenizer).values())
    held_out = [token for tokens in demo.encode_files(held_out_files, tokenizer).values() for token in tokens]
    teacher = Qwen3ForCausalLM.from_pretrained(demo.DEFAULT_OUTPUT, dtype=torch.float32).eval().requires_grad_(False)
    student = HEADS[args.method](teacher)
    num_parameters = sum(p.numel() for p in student.parameters())
    print(f"{len(train_files)} files to learn from; {num_parameters} parameters", flush=True)
    record = draft_model.train(student, teacher, documents, args, distance)

    args.output.mkdir(parents=True, exist_ok=True)
    rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in student.state_dict().items()}
    save_file(rounded, args.output / "model.safetensors", metadata={"format": "pt"})
    (args.output / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read
    (args.output / "config.json").write_text(json.dumps(student.config(teacher, NUM_HEADS), indent=1) + "\n")
    student.load_state_dict({name: value.float() for name, value in rounded.items()})
    windows = torch.tensor(held_out).unfold(0, args.context_length, args.context_length)
    record |= {"held_out": agreement(student, teacher, windows[:: max(1, len(windows) // 64)])}
    header = {
        "command": " ".join(["python scripts/train_heads.py", *(sys.argv[1:] if argv is None else argv)]),
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
        "machine": machine.describe(torch.device("cpu")),
        "parameters": num_parameters,
        "train_files": len(train_files),
    }
    (args.output / "training.json").write_text(json.dumps(header | record, indent=1) + "\n")
    print(json.dumps(record["held_out"]))


if __name__ == "__main__":
    main()
