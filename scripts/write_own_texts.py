"""Has the bundled demo model write texts, which drafters of it can learn from: what they will guess is what it says.

    python scripts/write_own_texts.py texts.npz

It goes on from pieces of the files that it has learned from; none are held out, and none are prompts of a benchmark. A
share of the prompts (`--edits`) is made as edits of code are: half of these have the beginning of a piece once more
behind it, half that behind the piece with one token in the place of another. The others are a piece as it is. A share
of the outputs (`--greedy`) is greedy; of the others a quarter is of temperature 0.7, the rest of 1. The file has
`texts`, uint16 `[N, 513]`, prompts and outputs, and `prompt_lengths`, int64 `[N]`.
"""

import argparse
import random
from pathlib import Path

import own_checkout
import numpy as np
import train_demo_model as demo
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.command_line import FlagParser
from compiled_llm.quantizing.texts import read_source_files, split_files

LENGTH = 513  # of a text, in tokens
_AT_ONCE = 256  # texts
_SEPARATORS = ("\n\n# Once more:\n", "\n\n\n", "")


class Prompts:
    """Random prompts out of the files of training, the same for the same seed."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, max_files: int | None, edits: float = 0.6
    ) -> None:
        files, _ = split_files(read_source_files(max_files))
        self._files = [tokens for tokens in demo.encode_files(files, tokenizer).values() if len(tokens) > 200]
        self._separators = [tokenizer.encode(text, add_special_tokens=False) for text in _SEPARATORS]
        self.random, self._edits = random.Random(seed), edits

    def one(self) -> list[int]:
        """A prompt's tokens."""
        kind = self.random.random()
        if kind >= self._edits:
            return self._piece(32, 256)
        piece = self._piece(40, 180)
        beginning = piece[: self.random.randint(1, 12)]
        separator = self.random.choice(self._separators)
        return piece + separator + ([] if kind < self._edits / 2 else self._changed(piece) + separator) + beginning

    def _piece(self, least: int, most: int) -> list[int]:
        file = self.random.choice(self._files)
        count = min(self.random.randint(least, most), len(file) - 1)
        start = self.random.randrange(len(file) - count)
        return file[start : start + count]

    def _changed(self, piece: list[int]) -> list[int]:
        before, after = self.random.choice(piece), self.random.choice(piece)
        return [after if token == before else token for token in piece]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, help="file to write (.npz)")
    parser.add_argument("--num-texts", type=int, default=1024)
    parser.add_argument("--edits", type=float, default=0.6, help="share of prompts that are edits (default: 0.6)")
    parser.add_argument("--greedy", type=float, default=0.4, help="share of greedy outputs (default: 0.4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-files", type=int, help="use only the first so many files, for a quick try")
    args = parser.parse_args(argv)
    if args.num_texts < 1:
        parser.error(f"--num-texts must be 1 or more, got {args.num_texts}")
    for name in ("edits", "greedy"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name} must be from 0 to 1, got {getattr(args, name)}")
    if args.output.suffix != ".npz" or not args.output.parent.is_dir():
        parser.error(f"output must be a file.npz in a folder that is there, got {args.output}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    prompts = Prompts(AutoTokenizer.from_pretrained(demo.DEFAULT_OUTPUT), args.seed, args.max_files, args.edits)
    texts, lengths = list[list[int]](), list[int]()
    with CompiledEngine(str(demo.DEFAULT_OUTPUT)) as engine:
        while (count := min(_AT_ONCE, args.num_texts - len(texts))) > 0:
            given = [prompts.one() for _ in range(count)]
            params = [_params(prompts.random, LENGTH - len(prompt), args.greedy) for prompt in given]
            outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], params)
            texts += [prompt + list(o.outputs[0].token_ids) for prompt, o in zip(given, outputs, strict=True)]
            lengths += map(len, given)
    np.savez(args.output, texts=np.array(texts, dtype=np.uint16), prompt_lengths=np.array(lengths))


def _params(generator: random.Random, num_tokens: int, greedy: float) -> SamplingParams:
    temperature = 0.0 if generator.random() < greedy else generator.choice([0.7, 1.0, 1.0, 1.0])
    seed = generator.randrange(2**31)
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=seed, ignore_eos=True)


if __name__ == "__main__":
    main()
