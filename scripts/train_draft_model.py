"""Train a draft model for the bundled demo model: a smaller Qwen3 of the same vocabulary that guesses what it says.

    python scripts/write_own_texts.py texts.npz
    python scripts/train_draft_model.py --texts texts.npz      # into compiled_llm/demo_drafters/draft_model

It starts as the first and the last layer of the demo model between its embedding and its head, which stay as they are.
It reads the text that the demo model has learned from, and what that has written itself, and learns what the demo model
thinks of each next token rather than which one comes: the loss is the cross-entropy with its distribution
(distillation, Hinton et al., 2015, arXiv:1503.02531; of its own outputs, as Agarwal et al., 2023, arXiv:2306.13649).
Afterwards it measures on files that neither has seen how often both have the same likeliest token, and how much
probability they share, the sum of min(p, q): what speculative decoding accepts at best. `training.json` keeps the
record.
"""

import argparse
import copy
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import own_checkout
import numpy as np
import torch
import train_demo_model as demo
from muon import Muon
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3ForCausalLM

from compiled_llm.api.command_line import FlagParser
from compiled_llm.quantizing.texts import read_source_files, split_files
from compiled_llm.system import hardware as machine

DEFAULT_OUTPUT = demo.DEFAULT_OUTPUT.parent / "demo_drafters" / "draft_model"
NUM_CURVE_POINTS = 8
_OTHER_LEARNING_RATE = 0.001  # the peak, of norms and biases
_OWN_SHARE = 0.6  # of windows, where there are texts of the model's own


def parser_of(document: str | None, minutes: float, context_length: int) -> FlagParser:
    """The flags of each program that trains what drafts; ``document``: the program's own."""
    parser = FlagParser(description=(document or "").split("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=minutes, help=f"wall time of the training loop (default: {minutes:g})")
    add("--seed", type=int, default=0)
    add("--max-files", type=int, help="use only the first so many files, for a quick try")
    add("--context-length", type=int, default=context_length, help="of windows of files, in tokens: a multiple of 4")
    add("--learning-rate", type=float, default=0.01, help="the peak (default: 0.01; of Medusa heads 0.002)")
    add(
        "--texts",
        type=Path,
        help="what write_own_texts.py wrote: 6 of 10 windows, for Medusa heads all (default: none)",
    )
    return parser


def check(parser: FlagParser, args: argparse.Namespace, others: dict[str, tuple[bool, str]]) -> None:
    """Refuse bad arguments. ``others``: whether further ones hold, and what they must be."""
    rules = {
        "minutes": (0 < args.minutes < math.inf, "a positive number"),
        "output": (args.output.is_dir() or not args.output.exists(), "a folder, or not there yet"),
        "seed": (args.seed >= 0, "0 or more"),
        "max_files": (args.max_files is None or args.max_files >= 10, "10 or more, so that some can be held out"),
        "context_length": (args.context_length >= 16 and args.context_length % 4 == 0, "a multiple of 4, 16 or more"),
        "learning_rate": (0 < args.learning_rate < 1, "above 0 and below 1"),
        "texts": (args.texts is None or (args.texts.suffix == ".npz" and args.texts.is_file()), "a file.npz"),
    }
    for name, (holds, rule) in (rules | others).items():
        if not holds:
            parser.error(f"--{name.replace('_', '-')} must be {rule}, got {getattr(args, name)}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, minutes=8.0, context_length=512)
    parser.add_argument("--target", type=Path, default=demo.DEFAULT_OUTPUT, help="folder of the model to draft for")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write")
    layers = "of the model, counted from 0, that it starts as (default: 0 3)"
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 3], help=layers)
    args = parser.parse_args(argv)
    target = args.target.is_dir(), "a folder with a model"
    check(parser, args, {"target": target, "layers": (min(args.layers) >= 0, "0 or more")})
    return args


def build_student(layers: Sequence[int], teacher: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """These layers of ``teacher`` with its embedding, head and last norm, as a model of its own."""
    if max(layers) >= len(teacher.model.layers):
        raise SystemExit(f"--layers must be below the model's {len(teacher.model.layers)}, got {max(layers)}")
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers, config.layer_types = len(layers), [config.layer_types[number] for number in layers]
    student = Qwen3ForCausalLM(config)
    for own, number in zip(student.model.layers, layers, strict=True):
        own.load_state_dict(teacher.model.layers[number].state_dict())
    student.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    student.model.norm.load_state_dict(teacher.model.norm.state_dict())
    student.lm_head.load_state_dict(teacher.lm_head.state_dict())  # the embedding, unless the model has both
    for kept in (student.model.embed_tokens, student.lm_head):
        kept.requires_grad_(False)
    return student


def distance(student: torch.nn.Module, teacher: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the student with the teacher's distributions, in nats a token."""
    with torch.no_grad():
        wanted = teacher(input_ids=input_ids, use_cache=False).logits.softmax(-1)
    found = student(input_ids=input_ids, use_cache=False).logits.log_softmax(-1)
    return -(wanted * found).sum() / input_ids.numel()


@torch.no_grad()
def agreement(student: torch.nn.Module, teacher: torch.nn.Module, windows: torch.Tensor) -> dict[str, float]:
    """On ``windows`` [N, T]: how often the likeliest tokens are the same, and the probability that is shared."""
    same = shared = total = 0.0
    for window in windows:
        p, q = (model(input_ids=window[None], use_cache=False).logits[0].float() for model in (teacher, student))
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        shared += torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
        total += len(window)
    return {"same_likeliest_token": round(same / total, 4), "shared_probability": round(shared / total, 4)}


def windows(documents: list[list[int]], args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Endless batches ``[B, T + 1]`` of files, and of what the model wrote where ``args.texts`` has some."""
    texts = None if args.texts is None else np.load(args.texts)["texts"].astype(np.int64)
    generator, length = np.random.default_rng(args.seed), args.context_length + 1
    if texts is not None and texts.shape[1] < length:
        raise SystemExit(f"--context-length must be below the {texts.shape[1]} tokens of --texts, got {length - 1}")
    for rows in demo.batches(documents, args):
        for row in range(len(rows) if texts is not None else 0):
            if generator.random() < _OWN_SHARE:
                text = texts[generator.integers(len(texts))]
                start = generator.integers(len(text) - length + 1)
                rows[row] = torch.from_numpy(text[start : start + length])
        yield rows


def train(
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    documents: list[list[int]],
    args: argparse.Namespace,
    distance: Callable[..., torch.Tensor],
) -> dict[str, Any]:
    """Train for the budget of wall time, on windows of files and of what the model wrote; the record of it."""
    trained = [p for p in student.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.ndim == 2) is wanted] for wanted in (True, False))
    optimizers = {
        Muon(matrices, args.learning_rate): args.learning_rate,
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True): _OTHER_LEARNING_RATE,
    }
    steps = ((distance(student, teacher, rows[:, :-1].contiguous()), rows[:, 1:]) for rows in windows(documents, args))
    return descend(args, optimizers, ((loss, rows.numel()) for loss, rows in steps))


def descend(
    args: argparse.Namespace,
    optimizers: dict[torch.optim.Optimizer, float],
    losses: Iterator[tuple[torch.Tensor, int]],
) -> dict[str, Any]:
    """Steps for the budget of wall time; the learning rate follows the share of it that has passed.

    Args:
        optimizers: and the peak of the learning rate of each.
        losses: without an end: the loss of the next batch, and how many tokens that has.
    """
    budget, tokens_seen, steps, curve, recent = args.minutes * 60, 0, 0, [], []
    bar = tqdm(total=round(budget), unit="s", bar_format="{percentage:3.0f}%|{bar:30}| {n:.0f}/{total}s {postfix}")
    start = time.perf_counter()
    while (progress := (time.perf_counter() - start) / budget) < 1.0:
        loss, count = next(losses)
        loss.backward()
        for optimizer, peak_rate in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak_rate * demo.learning_rate_factor(progress)
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        tokens_seen += count
        recent = [*recent[-49:], loss.item()]
        elapsed = time.perf_counter() - start
        if elapsed / budget * NUM_CURVE_POINTS >= len(curve) + 1:
            curve.append({"seconds": round(elapsed), "tokens": tokens_seen, "loss": round(float(np.mean(recent)), 4)})
            bar.write(json.dumps(curve[-1]), file=sys.stderr)
        bar.n = min(elapsed, budget)
        bar.set_postfix_str(f"step {steps}  loss {np.mean(recent):.3f}  {tokens_seen / elapsed:.0f} tokens/s")
    bar.close()
    return {"steps": steps, "tokens_seen": tokens_seen, "final_loss": round(float(np.mean(recent)), 4), "curve": curve}


def distil(
    args: argparse.Namespace,
    command: Sequence[str],
    target: Path,
    build: Callable[[Qwen3ForCausalLM], Any],
    train: Callable[[Any, Qwen3ForCausalLM, list[list[int]], argparse.Namespace], dict[str, Any]],
    save: Callable[[Any, Qwen3ForCausalLM], Any],
    agreement: Callable[..., dict[str, Any]],
) -> None:
    """Train what ``build`` makes of the model in ``target`` to guess what that says, measure it, and write it all.

    Args:
        train: (student, teacher, files of tokens, args) -> the record of the training.
        save: (student, teacher) -> the student as it is read from ``args.output``, where it writes it.
        agreement: (student, teacher, windows of held-out files ``[N, T]``) -> what the record has of it.
    """
    torch.manual_seed(args.seed)
    train_files, held_out_files = split_files(read_source_files(args.max_files))
    tokenizer = AutoTokenizer.from_pretrained(target)
    documents = list(demo.encode_files(train_files, tokenizer).values())
    held_out = [token for tokens in demo.encode_files(held_out_files, tokenizer).values() for token in tokens]
    teacher = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
    student = build(teacher)
    num_parameters = sum(p.numel() for p in student.parameters())
    print(f"{len(train_files)} files to learn from; {num_parameters} parameters", flush=True)
    record = train(student, teacher, documents, args)

    args.output.mkdir(parents=True, exist_ok=True)
    saved = save(student, teacher)
    (args.output / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read
    windows = torch.tensor(held_out).unfold(0, args.context_length, args.context_length)
    record |= {"held_out": agreement(saved, teacher, windows[:: max(1, len(windows) // 64)])}
    header = {
        "command": " ".join(["python", *command]),
        "settings": {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name not in ("output", "target")
        },
        "machine": machine.describe(torch.device("cpu")),
        "parameters": num_parameters,
        "train_files": len(train_files),
    }
    (args.output / "training.json").write_text(json.dumps(header | record, indent=1) + "\n")
    print(json.dumps(record["held_out"]))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)

    def save(student: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
        student.bfloat16().save_pretrained(args.output)
        (args.output / "generation_config.json").unlink(missing_ok=True)
        return Qwen3ForCausalLM.from_pretrained(args.output, dtype=torch.float32).eval()

    own_train = functools.partial(train, distance=torch.compile(distance, dynamic=False))
    command = ["scripts/train_draft_model.py", *(sys.argv[1:] if argv is None else argv)]
    distil(args, command, args.target, functools.partial(build_student, args.layers), own_train, save, agreement)


if __name__ == "__main__":
    main()
