"""Medusa heads of the demo model, and how `train_heads.py` trains them: on hidden states that are computed once.

A head reads one hidden state and nothing else, and the model that gives it does not change. So the model reads each
text once, and a batch is random rows of all texts. What a head learns is the token that came: where the model wrote the
text itself this is its likeliest one (greedy) or a sample of its distribution, and of such texts only what the model
wrote is learned, as nothing else is drafted. The products are of bfloat16; the model's head does not learn, so the
gradient of its input is made along with the loss, and logits are not kept.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_checkout
import numpy as np
import torch
import torch.nn.functional as F
import train_draft_model as draft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

NUM_HEADS = 4
LEARNING_RATE = 0.002  # the peak, of AdamW
_ROWS = 1024  # of a batch
_TEXTS_AT_ONCE = 16  # that the model reads


class Medusa(nn.Module):
    """Heads whose parameters have the names of vLLM's layout; see `models/draft_heads/medusa.py`."""

    def __init__(self, teacher: Qwen3ForCausalLM, num_blocks: int = 4) -> None:
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

    def go_on_from(self, directory: Path) -> None:
        """Take the weights of earlier heads."""
        self.load_state_dict(load_file(directory / "model.safetensors"))

    def rows(self, number: int, x: Tensor) -> Tensor:
        """What the model's head makes logits of for head ``number``: ``[R, D]`` -> ``[R, D]``, of the same dtype."""
        for linear in self.blocks[number]["layers"]:
            x = x + F.silu(F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype)))
        return x

    def logits(self, teacher: Qwen3ForCausalLM, input_ids: Tensor, hidden: tuple[Tensor, ...]) -> list[Tensor]:
        """Of each head, logits ``[B, T - 2, V]``: those of row p guess token p + 2, as far as its head j can see."""
        normed = teacher.model.norm(hidden[-1])
        found = []
        for number in range(NUM_HEADS):
            x = F.pad(normed, (0, 0, number, 0))[:, : normed.shape[1] - 2]  # of `number` rows before
            found.append(F.linear(self.rows(number, x), teacher.lm_head.weight))
        return found


class _Guessed(torch.autograd.Function):
    """The mean cross-entropy of ``rows @ head.T`` with ``targets``, whose gradient is made along with it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        loss, gradient = _loss_and_gradient(rows, head, targets)
        ctx.save_for_backward(gradient @ head)
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_loss, None, None


@torch.compile(dynamic=False)
def _loss_and_gradient(rows: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``[R, D]``, ``[V, D]`` and ``[R]``: the loss, and its gradient by the logits, ``[R, V]``."""
    logits = (rows @ head.T).float()
    total = logits.logsumexp(-1, keepdim=True)
    loss = (total - logits.gather(1, targets[:, None])).mean()
    is_target = torch.arange(logits.shape[1]) == targets[:, None]
    return loss, (((logits - total).exp() - is_target.float()) / len(rows)).to(rows.dtype)


def learned_rows(
    teacher: Qwen3ForCausalLM, documents: list[list[int]], args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """What heads read, bfloat16 ``[R, D]``, and the tokens that they are to say, int32 ``[R, NUM_HEADS]``.

    Of what the model wrote; where there is nothing of this, of the files.
    """
    if args.texts is None:
        stream = np.array([token for tokens in documents for token in tokens])
        length = args.context_length
        texts = stream[: len(stream) // length * length].reshape(-1, length)
        starts = np.ones(len(texts), dtype=np.int64)
    else:
        written = np.load(args.texts)
        texts, starts = written["texts"], written["prompt_lengths"]
    num_places = texts.shape[1] - NUM_HEADS - 1  # of a text, that have all tokens which its heads are to say
    counts = np.clip(num_places + 1 - starts, 0, num_places)  # of these, those that the model wrote
    # Made once: rows of 40,000 texts take 7 GB.
    hidden = torch.empty(int(counts.sum()), teacher.config.hidden_size, dtype=torch.bfloat16)
    following = torch.empty(len(hidden), NUM_HEADS, dtype=torch.int32)
    read, end = torch.compile(teacher.model, dynamic=False), 0
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        some = slice(first, first + _TEXTS_AT_ONCE)
        ids = torch.from_numpy(texts[some].astype(np.int64))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            states = read(input_ids=ids, use_cache=False).last_hidden_state.to(torch.bfloat16)
        guessed = ids.unfold(1, NUM_HEADS, 1)[:, 2:]  # row p: tokens p + 2 and on
        own = torch.arange(num_places) >= torch.from_numpy(starts[some])[:, None] - 1
        begin, end = end, end + int(counts[some].sum())
        hidden[begin:end], following[begin:end] = states[:, :num_places][own], guessed[own]
    return hidden, following


def train(
    student: Medusa,
    teacher: Qwen3ForCausalLM,
    documents: list[list[int]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Train for the budget of wall time, which begins when all is read; the record of it."""
    hidden, following = learned_rows(teacher, documents, args)
    if len(hidden) < _ROWS:
        raise SystemExit(f"too little text: {len(hidden)} rows to learn from, where a batch has {_ROWS}")
    head = teacher.lm_head.weight.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def losses() -> Iterator[tuple[Tensor, int]]:
        generator = torch.Generator().manual_seed(args.seed)
        while True:
            order = torch.randperm(len(hidden), generator=generator)
            for rows in order[: len(order) // _ROWS * _ROWS].split(_ROWS):
                read, wanted = hidden[rows], following[rows].long().T.contiguous()
                loss = sum(_Guessed.apply(student.rows(j, read), head, wanted[j]) for j in range(NUM_HEADS))
                yield loss / NUM_HEADS, len(rows)

    return {"rows": len(hidden)} | draft_model.descend(args, {optimizer: args.learning_rate}, losses())
