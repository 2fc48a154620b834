"""What an engine on a GPU would refuse is refused before anything is generated."""

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.gpu_step.fake_step import generate_step
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
