"""Train what drafts for the bundled demo model from its hidden states: an EAGLE-3 head, Medusa heads, or an MTP layer.

    python scripts/write_own_texts.py texts.npz
    python scripts/train_heads.py eagle3 --texts texts.npz      # into compiled_llm/demo_drafters/eagle3
    python scripts/train_heads.py medusa --texts texts.npz
    python scripts/train_heads.py mtp --texts texts.npz --output demo-mtp --minutes 25 --context-length 256

The EAGLE-3 head reads the text that the demo model has learned from, and what that has written itself, and learns what
it thinks of the tokens that follow: the loss is the cross-entropy with its distributions. It learns from its own
outputs, too, as it will draft from them ("training-time test", Li et al., 2025, arXiv:2503.01840). So does the layer
for multi-token prediction, which is written with the whole model, see `mtp_layer.py`. Medusa heads learn what the model
wrote, see `medusa_heads.py`; for those that ship it wrote with `--num-texts 40960 --edits 0.8` and `--greedy 0.6`. All
use the embedding and the head of the demo model. Afterwards it is measured on files that neither has seen how often
each draft is the demo model's likeliest token, where the text before it is given. `training.json` keeps the record.
"""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import own_checkout
import medusa_heads
import mtp_layer
import torch
import torch.nn.functional as F
import train_demo_model as demo
import train_draft_model as draft_model
from draft_attention import attended, of_row_before
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

NUM_HEADS = medusa_heads.NUM_HEADS  # and drafts that the others learn to make one after another
_DECAY = 0.8  # what the next draft counts, as a share of the one before


class Eagle3(nn.Module):
    """A head whose parameters have the names of the layout of `speculators`; see `models/draft_heads/eagle3.py`."""

    def __init__(self, teacher: Qwen3ForCausalLM) -> None:
        super().__init__()
        c = teacher.config
        # What goes into the last layers, not what comes out of the last: a prompt's rows then need no last MLP.
        self.layer_ids = list(range(c.num_hidden_layers - 3, c.num_hidden_layers))
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

    def go_on_from(self, directory: Path) -> None:
        """Take the weights of an earlier head. What it made of a layer is made of the nearest that this one reads."""
        tensors = load_file(directory / "model.safetensors")
        earlier = json.loads((directory / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
        parts = [torch.zeros_like(part) for part in tensors["fc.weight"].chunk(len(self.layer_ids), -1)]
        for number, part in zip(earlier, tensors["fc.weight"].chunk(len(earlier), -1), strict=True):
            parts[min(range(len(parts)), key=lambda place: abs(self.layer_ids[place] - number))] += part
        self.load_state_dict(tensors | {"fc.weight": torch.cat(parts, -1)})

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
            features = of_row_before(out)
        return found

    def _rows(self, features: Tensor, embedded: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        w, h = self.layers["0"], self.sizes[-1]
        both = torch.cat((embedded, w["hidden_norm"](features)), -1)
        heads = (w["self_attn"][f"{name}_proj"](both).unflatten(-1, (-1, h)).transpose(1, 2) for name in "qkv")
        q, keys, values = heads
        x = features + w["self_attn"]["o_proj"](attended(q, keys, values, self.theta, seen))
        y = w["post_attention_layernorm"](x)
        return x + w["mlp"]["down_proj"](F.silu(w["mlp"]["gate_proj"](y)) * w["mlp"]["up_proj"](y))


HEADS = {"eagle3": Eagle3, "medusa": medusa_heads.Medusa, "mtp": mtp_layer.Mtp}


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = draft_model.parser_of(__doc__, minutes=5.0, context_length=128)
    parser.add_argument("method", choices=list(HEADS))
    parser.add_argument("--output", type=Path, help="folder to write (default, not for mtp: that of the bundled one)")
    parser.add_argument(
        "--start", type=Path, help="folder of heads, or checkpoint of mtp, to go on from (default: new ones)"
    )
    parser.set_defaults(learning_rate=None)
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        args.learning_rate = medusa_heads.LEARNING_RATE if args.method == "medusa" else 0.01
    if args.output is None:
        if args.method == "mtp":
            parser.error("--output must be given with mtp, which writes a whole checkpoint")
        args.output = demo.DEFAULT_OUTPUT.parent / "demo_drafters" / args.method
    others = {"start": (args.start is None or args.start.is_dir(), "a folder with heads")}
    if args.method == "mtp":
        has_layer = args.start is None or mtp_layer.is_checkpoint(args.start)
        others["start"] = has_layer, "a folder that train_heads.py mtp has written"
        is_free = args.output.is_dir() or not args.output.exists()
        is_other = args.output.resolve() != demo.DEFAULT_OUTPUT.resolve()
        others["output"] = is_free and is_other, "a folder, or not there yet, and not the bundled model's"
    draft_model.check(parser, args, others)
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
    return _distance(student, teacher, input_ids, logits.float().softmax(-1), hidden)


def distance_in_bfloat16(student: Any, teacher: Qwen3ForCausalLM, input_ids: Tensor) -> Tensor:
    """The same, with products in bfloat16: three times as fast where the processor has these."""
    with torch.autocast("cpu", torch.bfloat16):
        return distance(student, teacher, input_ids)


@torch.compile(dynamic=False)
def _distance(
    student: Any, teacher: Qwen3ForCausalLM, input_ids: Tensor, wanted: Tensor, hidden: tuple[Tensor, ...]
) -> Tensor:
    losses = [
        -(wanted * found.float().log_softmax(-1))[:, number:].sum() / wanted[:, number:, 0].numel()
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


def write_heads(student: Any, teacher: Qwen3ForCausalLM, tensors: dict[str, Tensor], output: Path) -> None:
    """Heads in a checkpoint of their own."""
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(student.config(teacher, NUM_HEADS), indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)

    def save(student: Any, teacher: Qwen3ForCausalLM) -> Any:
        rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in student.state_dict().items()}
        (mtp_layer.write if args.method == "mtp" else write_heads)(student, teacher, rounded, args.output)
        student.load_state_dict({name: value.float() for name, value in rounded.items()})
        return student

    def build(teacher: Qwen3ForCausalLM) -> Any:
        student = HEADS[args.method](teacher)
        if args.start is not None:
            student.go_on_from(args.start)
        return student

    train = {
        "eagle3": functools.partial(draft_model.train, distance=distance),
        "medusa": medusa_heads.train,
        "mtp": functools.partial(draft_model.train, distance=distance_in_bfloat16),
    }
    command = ["scripts/train_heads.py", *(sys.argv[1:] if argv is None else argv)]
    draft_model.distil(args, command, demo.DEFAULT_OUTPUT, build, train[args.method], save, agreement)


if __name__ == "__main__":
    main()
