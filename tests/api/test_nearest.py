"""Misspelt names: the nearest of the known ones, the best first, and none for what is near to nothing."""

import dataclasses
import random

import pytest

from compiled_llm import EngineConfig, SamplingParams
from compiled_llm.api.nearest import nearest

FLAGS = ["--input", "--output", "--ordered", "--order-window", "--mode", "--check", "--report", "--quiet", "--trace"]
FLAGS += [
    "--" + field.name.replace("_", "-") for cls in (EngineConfig, SamplingParams) for field in dataclasses.fields(cls)
]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--modle", ["--model", "--mode"]),
        ("--modes", ["--mode", "--model"]),
        ("--inptu", ["--input"]),
        ("--bucket", ["--bucket-sizes"]),
        ("--max_num_seqs", ["--max-num-seqs"]),
        ("--topk", ["--top-k"]),
        ("--quant", ["--quantization", "--quantization-skip", "--quantization-head"]),
        ("--quite", ["--quiet"]),
        ("--order", ["--ordered", "--order-window"]),
        ("--num-blocks", ["--num-kv-blocks"]),
        ("--qqq", []),
        ("--", []),
        ("", []),
        ("x" * 10**6, []),
    ],
)
def test_the_best_is_first(given: str, found: list[str]) -> None:
    assert nearest(given, FLAGS) == found


def slips(word: str) -> list[str]:
    """Each letter left out, doubled, or in the place of the next one."""
    left_out = [word[:place] + word[place + 1 :] for place in range(len(word))]
    doubled = [word[:place] + word[place] + word[place:] for place in range(len(word))]
    swapped = [word[:place] + word[place + 1] + word[place] + word[place + 2 :] for place in range(len(word) - 1)]
    return [*left_out, *doubled, *swapped]


@pytest.mark.parametrize("count", [40, pytest.param(None, marks=pytest.mark.battery)])
def test_one_slip_leads_to_the_flag_that_was_meant(count: int | None) -> None:
    """Of flags of five letters and more."""
    typed = [(flag, f"--{slip}") for flag in FLAGS if len(flag) > 6 for slip in slips(flag[2:])]
    typed = [(flag, slip) for flag, slip in typed if slip not in FLAGS]
    sample = typed if count is None else random.Random(0).sample(typed, count)
    found = {slip: nearest(slip, FLAGS) for _, slip in sample}
    assert not [(flag, slip, found[slip]) for flag, slip in sample if flag not in found[slip][:2]]
    firsts = sum(found[slip][0] == flag for flag, slip in sample)
    assert firsts >= 0.98 * len(sample), "best first"
