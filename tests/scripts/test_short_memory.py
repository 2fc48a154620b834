"""A command has the memory that it is given and no more; a model of 1.5 times that is served, with the same tokens."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compiled_llm.models.config_file import read_config
from compiled_llm.models.registry import family_of
from scripts.rooms import ROOT
from tests.scripts.test_gpu_validate import load

run = load(ROOT / "scripts/short_memory.py").run

_PROGRAM = """
import json, sys
from compiled_llm import CompiledEngine, SamplingParams

how = {"bucket_sizes": (2,), "token_bucket_sizes": (16,), "num_kv_blocks": 16, "max_model_len": 64}
how |= {"weights_path": sys.argv[2] or None, "enforce_eager": True, "progress": "off"}
with CompiledEngine(sys.argv[1], **how) as engine:
    asked = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": [6]}]
    outputs = [output.outputs[0].token_ids for output in engine.generate(prompts, asked, use_tqdm=False)]
    rows = {row.where: row.bytes for row in engine.memory_report().rows if row.name == "mapped weights"}
    print(json.dumps([outputs, rows, engine.stats().disk_bytes]), file=open(sys.argv[3], "w"))
"""


@pytest.fixture(autouse=True)
def may_make_groups() -> None:
    try:
        run([sys.executable, "-c", ""], 64 << 20)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


@pytest.mark.parametrize(("mib", "ends_well"), [(300, True), (40, False)])
def test_a_command_has_what_it_is_given(mib: int, ends_well: bool) -> None:
    status = run([sys.executable, "-c", "x = bytearray(200 << 20)\nx[::4096] = x[::4096]"], mib << 20)
    assert (status == 0) is ends_well


@pytest.mark.battery
def test_a_model_of_one_and_a_half_times_the_memory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 1024}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 256}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **sizes, **heads}
    (model / "config.json").write_text(json.dumps(config))
    made = read_config(model)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape).mul_(shape[-1] ** -0.5).bfloat16() if len(shape) > 1 else torch.ones(shape).bfloat16()
        for name, shape in family_of(made).describe(made).taken.items()
    }
    save_file(tensors, model / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    del tensors

    def served(kept: str, granted: int) -> list:
        answer = tmp_path / "answer.json"
        assert run([sys.executable, "-c", _PROGRAM, str(model), kept, str(answer)], granted) == 0
        return json.loads(answer.read_text())

    tokens, rows, read = served("", 8 << 30)
    assert (rows, read) == ({}, 0)
    for _ in ("packed and written", "found"):
        again, rows, read = served(str(tmp_path / "kept"), int(size / 1.5))
        assert again == tokens
        assert rows["disk"] > 0
        assert read > 0
