"""A file of measured products decides what a step launches. In a process of its own: this file as a program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_llm.gpu_step.fake_step import pretend
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.ops.linear import product_choices
from compiled_llm.ops.linear.product_choices import Choice, LinearTile, Product, path_of, save
from tests.gpu_step import family_steps

pytest.importorskip("triton")

BATCH_OF_64 = {"bucket_sizes": (64,), "token_bucket_sizes": (64,), "max_num_batched_tokens": 64}
# The layers of "llama" of tests/families.py.
CHOICES = {
    Product(320, 112, "gate"): (Choice(64, "apart"),),
    Product(192, 112, "residual"): (Choice(1, "apart"), Choice(64, "fused", LinearTile(32, 64, 64, 4, 3))),
}


@pytest.mark.battery
def test_a_file_changes_the_launches(tmp_path: Path) -> None:
    """Of qkv, o, gate_up and down in a decode of two, and of 64; by default the first has all four fused."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_step.test_chosen_products", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    of_two, of_64 = map(json.loads, done.stdout.splitlines())
    fused, gate_up_apart = "exact_linear_kernel", ["norm_kernel", "mm", "gated_kernel"]
    assert of_two == ["decode_kernel", fused, *gate_up_apart, fused, "norm_kernel", fused]
    assert of_64 == ["decode_kernel", "mm", *gate_up_apart, "mm", "norm_kernel", fused]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    product_choices.FOLDER = folder
    gpu = GPUS["h100"]
    pretend(gpu)
    save(path_of(gpu.name), gpu.name, CHOICES)
    for bucket, arguments in (("decode_2", {}), ("decode_64", BATCH_OF_64)):
        torch.compiler.reset()
        step = family_steps.step(gpu, "llama", bucket, arguments, 0)
        print(json.dumps(step["layers"][0]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
