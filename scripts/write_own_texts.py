"""Has the bundled demo model write texts, which drafters of it can learn from: what they will guess is what it says.

    python scripts/write_own_texts.py texts.npy

It goes on from pieces of the files that it has learned from; none are held out, and none are prompts of a benchmark. Of
ten prompts four are a piece as it is; three the beginning of a piece once more behind it, and three that behind the
piece with one token in the place of another, as edits of code have it. Two of five outputs are greedy, one is of
temperature 0.7 and two of 1. Each text, prompt and output, has 513 tokens; uint16 `[N, 513]`.
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

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, max_files: int | None) -> None:
        files, _ = split_files(read_source_files(max_files))
        self._files = [tokens for tokens in demo.encode_files(files, tokenizer).values() if len(tokens) > 200]
        self._separators = [tokenizer.encode(text, add_special_tokens=False) for text in _SEPARATORS]
        self.random = random.Random(seed)

    def one(self) -> list[int]:
        """A prompt's tokens."""
        kind = self.random.random()
        if kind < 0.4:
            return self._piece(32, 256)
        piece = self._piece(40, 120)
        beginning = piece[: self.random.randint(1, 12)]
        separator = self.random.choice(self._separators)
        return piece + separator + ([] if kind < 0.7 else self._changed(piece) + separator) + beginning

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
    parser.add_argument("output", type=Path, help="file to write (.npy)")
    parser.add_argument("--num-texts", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-files", type=int, help="use only the first so many files, for a quick try")
    args = parser.parse_args(argv)
    if args.num_texts < 1:
        parser.error(f"--num-texts must be 1 or more, got {args.num_texts}")
    if args.output.suffix != ".npy" or not args.output.parent.is_dir():
        parser.error(f"output must be a file.npy in a folder that is there, got {args.output}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    prompts = Prompts(AutoTokenizer.from_pretrained(demo.DEFAULT_OUTPUT), args.seed, args.max_files)
    texts = list[list[int]]()
    with CompiledEngine(str(demo.DEFAULT_OUTPUT)) as engine:
        while (count := min(_AT_ONCE, args.num_texts - len(texts))) > 0:
            given = [prompts.one() for _ in range(count)]
            params = [_params(prompts.random, LENGTH - len(prompt)) for prompt in given]
            outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], params)
            texts += [prompt + list(o.outputs[0].token_ids) for prompt, o in zip(given, outputs, strict=True)]
    np.save(args.output, np.array(texts, dtype=np.uint16))


def _params(generator: random.Random, num_tokens: int) -> SamplingParams:
    temperature, seed = generator.choice([0, 0, 0.7, 1.0, 1.0]), generator.randrange(2**31)
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=seed, ignore_eos=True)


if __name__ == "__main__":
    main()
