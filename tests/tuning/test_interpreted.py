"""What tuning runs and writes, in Triton's interpreter on a CPU: one process for all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.ops.linear import product_choices, quantized_tiles
from compiled_llm.ops.linear.product_choices import Product

pytest.importorskip("triton")

PROGRAM = """
import sys
from dataclasses import replace
import torch
from compiled_llm.commands.tune.linear import main
from compiled_llm.ops.attention.tiles import default_config
from compiled_llm.tuning import attention

attention.CACHE_BYTES = 0
for query_len in map(int, sys.argv[1].split(",")):
    step, outputs = attention.Step(2, query_len, 20, 64, torch.int8, "cpu"), []
    for block in (16, 32):
        tiles = replace(default_config(64, 2, 1, (9, 0)), decode_block_n=block, split_block_n=block)
        if query_len == 1:
            step.make_plan(tiles)
        outputs.append(step.run(0, tiles))
    assert outputs[0].abs().max() > 0.1
    assert torch.allclose(*outputs, atol=2e-2, rtol=2e-2)

for words in sys.argv[2:]:
    assert main("compiled-llm tune linear", [*words.split(), "--seconds", "0.1"]) == 0
"""
PLAIN = "--kind bfloat16 --layer 32x64 --rows 2 33 2048"
LAYERS = {"int8_w8a8": "--layer 16x64", "int4": "--layer 24x72", "int8": "--layer 16x64 --experts 2"}


def run(directory: Path, query_lens: str, *words: str) -> list[str]:
    """Lines that the commands printed, after steps of attention with so many tokens a request."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, query_lens, *words],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    assert "does not run" not in done.stdout
    return done.stdout.splitlines()


def check_tiles(file: Path, kind: str) -> None:
    ((found, choices),) = quantized_tiles.load(file).items()
    assert (found.element, found.int8_activations) == (kind[:4], kind == "int8_w8a8")
    assert found.experts == (2 if "--experts" in LAYERS[kind] else 0)
    assert [choice.rows for choice in choices] == [16, 17]


@pytest.mark.battery
def test_files_that_kernels_read(tmp_path: Path) -> None:
    tiles, products = tmp_path / "tiles.json", tmp_path / "products.json"
    quantised = f"--kind int8_w8a8 {LAYERS['int8_w8a8']} --rows 16 17 --output {tiles}"
    lines = run(tmp_path, "1", quantised, f"{PLAIN} --output {products}")
    written = [json.loads(line)["tiles"] for line in lines if line.startswith("{")]
    assert written == [str(tiles), str(products)]
    check_tiles(tiles, "int8_w8a8")
    found = product_choices.load(products)
    assert set(found) == {Product(32, 64, around) for around in product_choices.AROUND}
    assert all([choice.rows for choice in choices] == [2, 33] for choices in found.values())


@pytest.mark.battery
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_files_of_other_kinds(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    run(tmp_path, "1,3", f"--kind {kind} {LAYERS[kind]} --rows 16 17 --output {file}")
    check_tiles(file, kind)
