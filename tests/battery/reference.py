"""What the batteries of tokens compare with: transformers' float32 model, greedy, one prompt at a time.

And the prompts they draw from. Many begin alike, for as many tokens as it takes to share no block, some, or all.
"""

import functools
import itertools
import json
import random

import torch
import transformers

from compiled_llm.engine.engine import DEMO_MODEL
from tests.families import checkpoint, transformers_model

NUM_TOKENS = 32
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 48, 64, 65, 97, 128, 149, 150)


@functools.cache
def prompts(model: str) -> list[list[int]]:
    """40 prompts: of each of 6 texts 5 beginnings and one that goes on differently; 4 of these a second time."""
    rng = random.Random(4)
    texts = _demo_texts() if model == "demo" else [[rng.randrange(3, 300) for _ in range(200)] for _ in range(6)]
    distinct = []
    for text, other in zip(texts, texts[1:] + texts[:1], strict=True):
        distinct += [text[:length] for length in rng.sample(LENGTHS, 5)]
        # From a block's end on as another text: its blocks have the same tokens there, after others.
        start = rng.choice((16, 32, 64))
        distinct.append(text[:start] + other[start : start + rng.randrange(33, 60)])
    return distinct + rng.sample(distinct, 4)


def _demo_texts() -> list[list[int]]:
    """6 texts of at least 200 tokens each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    rows = (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()
    bundled = [tokenizer(json.loads(row)["prompt"]).input_ids for row in rows]
    return [list(itertools.chain(*bundled[first::6])) for first in range(6)]


def model_directory(model: str) -> str | None:
    """The argument ``model`` of an engine."""
    return None if model == "demo" else str(checkpoint(model))


@functools.cache
def _transformers_model(model: str) -> transformers.PreTrainedModel:
    if model == "demo":
        return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    return transformers_model(model)


@functools.cache
def expected_tokens(model: str, prompt: tuple[int, ...]) -> list[int]:
    """The 32 tokens that follow ``prompt``."""
    return [token for token, _ in tokens_and_gaps(model, prompt)]


def tokens_and_gaps(model: str, prompt: tuple[int, ...]) -> list[tuple[int, float]]:
    """The same, with how far the logit of each is above the next best."""
    reference, step, cache = _transformers_model(model), torch.tensor([prompt]), None
    found: list[tuple[int, float]] = []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            result = reference(step, past_key_values=cache, use_cache=True)
            best, next_best = result.logits[0, -1].topk(2).values.tolist()
            cache, step = result.past_key_values, result.logits[:, -1].argmax(-1, keepdim=True)
            found.append((int(step), best - next_best))
    return found
