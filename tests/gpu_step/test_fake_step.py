"""What an engine on a GPU would refuse is refused before anything is generated."""

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.gpu_step.fake_step import generate_step, with_bucket
from compiled_llm.models.config_file import parse_config
from tests.families import CONFIGS


@pytest.mark.parametrize(
    ("capability", "bucket", "said"),
    [
        ((8, 0), "decode_2", "kv_cache_dtype='fp8' needs a GPU of compute capability"),
        ((9, 0), "decode_3", "the bucket must be one of the engine's, decode_2, .*given 'decode_3'"),
    ],
)
def test_what_the_engine_refuses(
    capability: tuple[int, int], bucket: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = parse_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIGS["llama"][1]})
    engine = EngineConfig(device="cuda", bucket_sizes=(2,), kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=said):
        generate_step(engine, model, bucket)


def test_an_engine_with_drafts_has_a_bucket_for_them() -> None:
    model = parse_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIGS["llama"][1]})
    plain = EngineConfig(bucket_sizes=(2,))
    drafting = EngineConfig(bucket_sizes=(2,), speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert with_bucket(drafting, model, "decode_2x4").bucket_sizes == (2,)
    assert with_bucket(drafting, model, "decode_8x4").bucket_sizes == (2, 8)
    for engine, name in ((plain, "decode_2x4"), (drafting, "decode_2x3"), (drafting, "tokens_64x4")):
        with pytest.raises(ValueError, match=rf"--bucket must be decode_<size> or tokens_<size>.*given '{name}'"):
            with_bucket(engine, model, name)
