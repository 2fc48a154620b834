"""Further published configs: each is one that is quoted elsewhere, with the fields in which it differs."""

from typing import Any

from tests.models.published_configs import SUPPORTED
from tests.models.published_dense import DENSE
from tests.models.published_norms import NORMS

_GLM = NORMS["glm-4-9b-chat-hf"][0]
_MINISTRAL3 = DENSE["Ministral-3-3B, its text_config"][0]

# Name -> (config.json, the fields that transformers ignores).
FURTHER: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gemma-2-27b": (
        {
            **SUPPORTED["gemma-2-9b"][0],
            "head_dim": 128,
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_attention_heads": 32,
            "num_hidden_layers": 46,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 144,
            "torch_dtype": "float32",
        },
        ["cache_implementation", "hidden_act", "sliding_window_size"],
    ),
    "granite-3.3-2b-instruct": (
        {
            **DENSE["granite-3.1-2b-instruct"][0],
            "attention_dropout": 0.0,
            "rope_theta": 10000000.0,
            "transformers_version": "4.49.0",
            "vocab_size": 49159,
        },
        [],
    ),
    "Ministral-3-8B, its text_config": (
        {
            **_MINISTRAL3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "tie_word_embeddings": False,
        },
        [],
    ),
    "glm-4-9b-hf": ({**_GLM, "max_position_embeddings": 8192}, []),
    "glm-4-9b-chat-1m-hf": ({**_GLM, "max_position_embeddings": 1048576, "num_key_value_heads": 4}, []),
    "GLM-Z1-9B-0414": ({**NORMS["GLM-4-9B-0414"][0], "transformers_version": "4.51.3"}, []),
    "Olmo-3-7B-Instruct": (
        {**NORMS["Olmo-3-1025-7B"][0], "eos_token_id": 100265, "transformers_version": "4.57.1"},
        [],
    ),
}
