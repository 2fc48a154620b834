"""Kinds of rotary embeddings that Phi-3's configs name, and the length they begin with."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.rope_config import LongRopeScaling
from tests.families import CONFIGS, strengthened

PHI3 = {"architectures": ["Phi3ForCausalLM"], **CONFIGS["phi3"][1]}
PARAMETERS = PHI3["rope_parameters"]


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_the_names_of_longrope(name: str, kind: str) -> None:
    given = {**{key: value for key, value in PARAMETERS.items() if key != "rope_type"}, name: kind}
    (rope,) = parse_config({**PHI3, "rope_parameters": given}).ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert (rope.partial, rope.scaling.original_max_position_embeddings) == (0.75, 256)


def test_the_first_length_that_is_left_out_is_transformers_default() -> None:
    longer = {name: value for name, value in PHI3.items() if name != "original_max_position_embeddings"}
    (rope,) = parse_config({**longer, "max_position_embeddings": 8192}).ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.original_max_position_embeddings == 4096


@pytest.mark.parametrize(("max_model_len", "prompt_len"), [(64, 34), (128, 80)])
def test_max_model_len_chooses_the_divisors(max_model_len: int, prompt_len: int, tmp_path: Path) -> None:
    """Texts within the first length, and texts longer than it, each as transformers computes them."""
    torch.manual_seed(0)
    config = transformers.Phi3Config(**{**copy.deepcopy(CONFIGS["phi3"][1]), "original_max_position_embeddings": 64})
    model = strengthened(transformers.Phi3ForCausalLM(config).eval())
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 307, (1, prompt_len))
    reference = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    sizes = {"bucket_sizes": (2,), "token_bucket_sizes": (8,), "max_model_len": max_model_len}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = CompiledEngine(str(tmp_path), enforce_eager=True, num_kv_blocks=20, **sizes)
    warned = [str(warning.message) for warning in caught if "long_factor" in str(warning.message)]
    assert len(warned) == (1 if max_model_len > 64 else 0)
    with engine:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        (output,) = engine.generate(prompt.tolist(), params, use_tqdm=False)
    assert output.outputs[0].token_ids == reference[0, prompt_len:].tolist()
