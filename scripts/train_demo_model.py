"""Train the bundled demo model: a small Qwen3 that completes Python, learned from the standard library's own source.

    python scripts/train_demo_model.py            # 25 minutes on two CPU cores, into compiled_llm/demo_model

What it does, in order: collects the standard library's source files and sets about 3% of them aside, chosen by a hash
of their path; trains a byte-level BPE vocabulary of 4096 tokens on the rest; trains the model for a budget of wall
time, with a learning rate that reaches zero just as the budget ends; rounds the weights to bfloat16 and measures those
on the files set aside; writes a folder that `transformers` loads. `training.json` in it keeps the record.

The model that ships: 5.2 million tokens, 1.6 passes over the text, at 3476 tokens a second on two cores that other work
kept busy for half of the time; held-out loss 2.57 nats a token, 1.06 bits a byte. Where the cores are shared, set
GOMP_SPINCOUNT=1000 (waiting threads then sleep soon, instead of spinning): without it a start made 360 tokens a second.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import own_checkout
import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from compiled_llm.api.command_line import FlagParser
from compiled_llm.quantizing.texts import read_source_files, split_files
from compiled_llm.system import hardware as machine

END_OF_TEXT = "<|endoftext|>"
WINDOWS_PER_BATCH = 3  # of context_length tokens each
MATRIX_LEARNING_RATE = 0.02  # the peak, for Muon
OTHER_LEARNING_RATE = 0.004  # the peak, for AdamW
NUM_CURVE_POINTS = 12
CHAT_TEMPLATE = r"""{#- Messages become comments of a Python file; the model answers with the function below them. -#}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- ('' if message.content.startswith('def ') else 'def') + message.content.rstrip() + '\n\n\n' -}}
    {%- else -%}
        {{- '# ' + message.content.strip() | replace('\n', '\n# ') + '\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    def
{%- endif -%}
"""
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "compiled_llm" / "demo_model"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="wall time of the training loop (default: 25)")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-files", type=int, help="use only the first so many files, for a quick try")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--context-length", type=int, default=1024, help="longest sequence, a multiple of 4")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 128: pairs of heads, 64 wide each")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    args = parser.parse_args(argv)

    rules = {
        "minutes": (0 < args.minutes < math.inf, "a positive number"),
        "output": (args.output.is_dir() or not args.output.exists(), "a folder, or not there yet"),
        "seed": (args.seed >= 0, "0 or more"),
        "max_files": (args.max_files is None or args.max_files >= 10, "10 or more, so that some can be held out"),
        "vocab_size": (257 <= args.vocab_size <= 65536, f"from 257 (256 bytes and {END_OF_TEXT}) to 65536"),
        "context_length": (args.context_length >= 16 and args.context_length % 4 == 0, "a multiple of 4, 16 or more"),
        "hidden_size": (args.hidden_size >= 128 and args.hidden_size % 128 == 0, "a positive multiple of 128"),
        "num_layers": (args.num_layers >= 1, "1 or more"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            parser.error(f"--{name.replace('_', '-')} must be {rule}, got {getattr(args, name)}")
    return args


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def encode_files(files: dict[str, str], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """Every file as tokens, with the end-of-text token before and after it: what ends one file announces the next."""
    end = tokenizer.get_vocab()[END_OF_TEXT]
    encodings = tokenizer.backend_tokenizer.encode_batch(list(files.values()), add_special_tokens=False)
    return {path: [end, *encoding.ids, end] for path, encoding in zip(files, encodings, strict=True)}


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=args.hidden_size // 128,
        head_dim=64,
        max_position_embeddings=args.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END_OF_TEXT],
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # every block starts as the identity
            torch.nn.init.zeros_(parameter)
    return model


def learning_rate_factor(progress: float) -> float:
    """Up over the first 2% of the budget, then down in a straight line to zero at its end."""
    return min(progress / 0.02, (1.0 - progress) / 0.98)


def sequence_length(progress: float, context_length: int) -> int:
    """Short sequences first: they cost less a token, and early on nothing far away is understood yet."""
    return context_length // (4 if progress < 0.4 else 2 if progress < 0.7 else 1)


def batches(documents: list[list[int]], args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Endless batches of windows of the context and one token. Every epoch uses all windows, cut at new places."""
    generator = np.random.default_rng(args.seed)
    while True:
        stream = np.concatenate([documents[i] for i in generator.permutation(len(documents))])
        stream = stream[generator.integers(args.context_length) :]
        num_windows = (len(stream) - 1) // args.context_length
        if num_windows < WINDOWS_PER_BATCH:
            raise SystemExit("too little text for one batch: raise --max-files or lower --context-length")
        order = generator.permutation(num_windows)
        for start in range(0, num_windows - WINDOWS_PER_BATCH + 1, WINDOWS_PER_BATCH):
            chosen = order[start : start + WINDOWS_PER_BATCH]
            rows = [stream[i * args.context_length :][: args.context_length + 1] for i in chosen]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


def next_token_loss(model: torch.nn.Module, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over the tokens, in nats."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, tokens: list[int]) -> float:
    """Mean loss over one document, cut into windows of the context length: every token is predicted once."""
    context, total = model.config.max_position_embeddings, 0.0
    for start in range(0, len(tokens) - 1, context):
        window = torch.tensor(tokens[start : start + context + 1])[None]
        total += next_token_loss(model, window[:, :-1], window[:, 1:]).item()
    return total / (len(tokens) - 1)


def train(
    model: Qwen3ForCausalLM, train_documents: list[list[int]], held_out_windows: torch.Tensor, args: argparse.Namespace
) -> dict:
    """Train for the budget of wall time; every schedule follows the share of it that has passed."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
    optimizers = {
        torch.optim.Muon(matrices, weight_decay=0.01, momentum=0.95): MATRIX_LEARNING_RATE,
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True): OTHER_LEARNING_RATE,
    }
    loss_function = torch.compile(next_token_loss, dynamic=False) if args.compile else next_token_loss

    def batch_loss(rows: torch.Tensor, function=loss_function) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(model, rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / rows[:, 1:].numel()

    def cut(rows: torch.Tensor, length: int) -> torch.Tensor:
        """Windows of `length` tokens and the one after, out of longer ones; neighbours share the token at the cut."""
        return rows.unfold(1, length + 1, length).reshape(-1, length + 1)

    stream = batches(train_documents, args)
    for progress in (0.0, 0.5, 0.9):  # compile for the three sequence lengths before the clock starts
        if args.compile:
            batch_loss(cut(next(stream), sequence_length(progress, args.context_length))).backward()
            model.zero_grad()

    budget, tokens_seen, step, curve = args.minutes * 60, 0, 0, []
    recent_losses: list[float] = []
    bar = tqdm(total=round(budget), unit="s", bar_format="{percentage:3.0f}%|{bar:30}| {n:.0f}/{total}s {postfix}")
    start = time.perf_counter()
    while (progress := (time.perf_counter() - start) / budget) < 1.0:
        rows = cut(next(stream), sequence_length(progress, args.context_length))
        loss = batch_loss(rows)
        loss.backward()
        for optimizer, peak_rate in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak_rate * learning_rate_factor(progress)
            optimizer.step()
            optimizer.zero_grad()

        step += 1
        tokens_seen += rows[:, 1:].numel()
        recent_losses = [*recent_losses[-49:], loss.item()]
        elapsed = time.perf_counter() - start
        if elapsed / budget * NUM_CURVE_POINTS >= len(curve) + 1:
            with torch.no_grad():
                held_out_loss = batch_loss(held_out_windows, next_token_loss).item()
            point = {"seconds": round(elapsed), "tokens": tokens_seen, "train_loss": round(np.mean(recent_losses), 4)}
            curve.append(point | {"held_out_loss": round(held_out_loss, 4)})
            bar.write(json.dumps(curve[-1]), file=sys.stderr)
        bar.n = min(elapsed, budget)
        bar.set_postfix_str(f"step {step}  loss {np.mean(recent_losses):.3f}  {tokens_seen / elapsed:.0f} tokens/s")
    bar.close()
    seconds = time.perf_counter() - start
    return {
        "steps": step,
        "tokens_seen": tokens_seen,
        "epochs": round(tokens_seen / sum(map(len, train_documents)), 2),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens_seen / seconds),
        "final_train_loss": round(float(np.mean(recent_losses)), 4),
        "curve": curve,
    }


def measure_held_out(model: Qwen3ForCausalLM, files: dict[str, str], documents: dict[str, list[int]]) -> dict:
    """Loss of every held-out file in float32, with its hash, to identify the file."""
    records, loss_sum, num_tokens, num_bytes = [], 0.0, 0, 0
    for path, tokens in tqdm(documents.items(), desc="held-out files"):
        loss, source = measure(model, tokens), files[path].encode()
        digest = hashlib.sha256(source).hexdigest()
        records.append({"path": path, "sha256": digest, "tokens": len(tokens) - 1, "loss": round(loss, 4)})
        loss_sum += loss * (len(tokens) - 1)
        num_tokens += len(tokens) - 1
        num_bytes += len(source)
    return {
        "final_held_out_loss": round(loss_sum / num_tokens, 4),
        "final_held_out_bits_per_byte": round(loss_sum / num_bytes / math.log(2), 4),
        "held_out_tokens": num_tokens,
        "held_out_bytes": num_bytes,
        "held_out_files": records,
    }


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, context_length: int) -> None:
    tokenizer.model_max_length = context_length
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"  # the name of the class that transformers before 5.0 knows too
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.manual_seed(args.seed)

    train_files, held_out_files = split_files(read_source_files(args.max_files))
    tokenizer = train_tokenizer(list(train_files.values()), args.vocab_size)
    train_documents = list(encode_files(train_files, tokenizer).values())
    held_out_documents = encode_files(held_out_files, tokenizer)
    model = build_model(args, tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    counts = f"{len(train_files)} files to learn from, {len(held_out_files)} held out; {num_parameters} parameters"
    print(counts, flush=True)

    held_out_stream = torch.tensor([token for tokens in held_out_documents.values() for token in tokens])
    held_out_windows = held_out_stream.unfold(0, args.context_length + 1, args.context_length)
    held_out_windows = held_out_windows[:: max(1, len(held_out_windows) // 16)]  # about 16, spread over the files
    record = train(model, train_documents, held_out_windows, args)

    args.output.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(args.output)
    (args.output / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(args.output)
    save_tokenizer(tokenizer, args.output, args.context_length)
    saved_model = Qwen3ForCausalLM.from_pretrained(args.output, dtype=torch.float32).eval()
    record |= measure_held_out(saved_model, held_out_files, held_out_documents)

    header = {
        "command": " ".join(["python scripts/train_demo_model.py", *(sys.argv[1:] if argv is None else argv)]),
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
        "machine": machine.describe(torch.device("cpu")) | {"tokenizers": tokenizers.__version__},
        "parameters": num_parameters,
        "train_files": len(train_files),
        "train_tokens": sum(map(len, train_documents)),
    }
    (args.output / "training.json").write_text(json.dumps(header | record, indent=1) + "\n")
    loss, bits = record["final_held_out_loss"], record["final_held_out_bits_per_byte"]
    print(f"held-out loss {loss} nats a token, {bits} bits a byte ({record['tokens_seen']} tokens seen)")


if __name__ == "__main__":
    main()
