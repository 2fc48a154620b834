"""What rounding at load costs two trained models: perplexity on English text of the standard library."""

import pydoc_data.topics
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from compiled_llm.api.config import EngineConfig
from compiled_llm.quality.teacher_forcing import compare, load_model, summary
from compiled_llm.quantizing.texts import Text
from compiled_llm.step.kv_cache import layer_dtypes
from tests.battery.test_gguf_files import PACKAGES, file_of

pytestmark = pytest.mark.battery
NUM_TOKENS = 2048
# Most of the change in perplexity. SmolLM2's weights were Q4_1 and come back; Gemma's have more than 16 values a group.
# Measured: 0.0047, 0.0065, 0.0015, 0.0019, 0.0039 and 0.437; Gemma -0.001, 0.005, 0.136, 0.144, 0.012 and 0.507.
MOST = {
    "smollm2": {"int8": 0.008, "int8_w8a8": 0.01, "int4": 0.005, "int4_w4a8": 0.005, "fp8": 0.008, "mxfp4": 0.5},
    "gemma3": {"int8": 0.005, "int8_w8a8": 0.01, "int4": 0.16, "int4_w4a8": 0.17, "fp8": 0.015, "mxfp4": 0.6},
}


def plain_checkpoint(name: str, directory: Path) -> Path:
    """The model of the package's GGUF file with its weights expanded to bfloat16."""
    path = file_of(name)
    given = {"gguf_file": path.name}
    packed = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **given, dtype=torch.bfloat16)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(packed.state_dict())
    plain.tie_weights()
    plain.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(path.parent, **given).save_pretrained(directory)
    return directory


@pytest.mark.filterwarnings("ignore")  # of transformers, for expanding and for names in its config
@pytest.mark.parametrize("name", PACKAGES)
def test_perplexity(name: str, tmp_path: Path, battery_counts: Counter[str]) -> None:
    directory, path = plain_checkpoint(name, tmp_path / "plain"), tmp_path / "text"
    path.write_text("\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    config = EngineConfig(model=str(directory), dtype="bfloat16")
    own = load_model(config)
    windows = Text(path, NUM_TOKENS, 1024).windows(config, own.config, own.device)
    dtypes = layer_dtypes(config, own.dtype, own.config)
    found = {}
    for kind in ("int8", "int8_w8a8", "int4", "int4_w4a8", "fp8", "mxfp4"):
        other = load_model(EngineConfig(model=str(directory), dtype="bfloat16", quantization=kind))
        found[kind] = summary(compare(own, other, dtypes, windows, 512, kind))
        change = found[kind]["perplexity_change"]
        print(f"| {name} | {kind} | {found[kind]['perplexity_quantised']:.4f} | {change:+.2%} |")
        assert change < MOST[name][kind], kind
        battery_counts["kinds"] += 1
    perplexity = {kind: one["perplexity_quantised"] for kind, one in found.items()}
    assert perplexity["int4_w4a8"] < 1.01 * perplexity["int4"]
    assert perplexity["int4"] < perplexity["mxfp4"]
