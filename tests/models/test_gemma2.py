"""What Gemma 2 alone has: a scale of the embedding that its dtype rounds, and checks of its config."""

import pytest
import torch

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.gemma2 import FAMILY, rounded
from tests.families import CONFIGS

GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], **CONFIGS["gemma2"][1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def testrounded_is_what_a_tensor_holds(dtype: torch.dtype) -> None:
    for value in (112**0.5, 2304**0.5, 3072**0.5, 3584**0.5, 4608**0.5, 64.0, 255.9, 0.3):
        assert rounded(value, dtype) == torch.tensor(value, dtype=dtype).item()


def test_head_and_embedding_are_tied_by_default() -> None:
    """Not in ``CONFIGS``, where greedy tokens would not vary."""
    config = parse_config({name: value for name, value in GEMMA2.items() if name != "tie_word_embeddings"})
    description = FAMILY.describe(config)
    assert description.weights.embedding is description.weights.head
    assert description.may_repeat == {"lm_head.weight": "model.embed_tokens.weight"}


def test_soft_caps_may_be_off_and_a_window_unused() -> None:
    off = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = parse_config({**GEMMA2, **off, "sliding_window": None, "layer_types": ["full_attention"] * 2})
    assert config.layer_types == ("full_attention",) * 2
