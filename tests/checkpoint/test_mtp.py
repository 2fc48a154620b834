"""Which models have a layer of their own that drafts, what it takes of the engine's arguments, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.draft_model import DraftCheckpoint, draft_checkpoint
from compiled_llm.checkpoint.model_files import model_config
from compiled_llm.engine.preflight import look_at
from compiled_llm.models.draft_heads.mtp import FAMILIES
from tests.families import checkpoint
from tests.mtp_checkpoints import mtp_checkpoint, mtp_tensors, write_checkpoint

SIZES: dict[str, Any] = {"bucket_sizes": (1, 2), "token_bucket_sizes": (64,), "max_model_len": 128}


def arguments(directory: Path, asked: str | None = None, **others: Any) -> EngineConfig:
    config = {"method": "mtp"} | ({} if asked is None else {"quantization": asked})
    return EngineConfig(model=str(directory), speculative_config=config, **others)


def found(directory: Path, asked: str | None = None, **others: Any) -> DraftCheckpoint:
    config = arguments(directory, asked, **others)
    one = draft_checkpoint(config, model_config(directory, config.model_impl), None)
    assert one is not None
    return one


def test_it_is_quantised_as_the_model_and_lies_in_its_files() -> None:
    directory = mtp_checkpoint("qwen3-next")
    one = found(directory, quantization="int8", quantization_skip=("lm_head",))
    assert (one.directory, one.num_tokens, one.config.quantization) == (directory, 2, "int8")
    assert (one.config.quantization_skip, one.config.speculative_config) == ((), None)
    assert one.model_config.architecture == "Qwen3NextForCausalLM.mtp"
    assert (one.model_config.num_layers, one.model_config.num_layers_before) == (1, 4)


@pytest.mark.parametrize("asked", [None, "none", "int8"])
def test_its_own_quantisation_takes_nothing_of_the_models_arguments(asked: str | None) -> None:
    """On a CPU a layer beside a model that is not quantised is rounded, unless that is refused."""
    directory, cpu = mtp_checkpoint("qwen3-next"), torch.device("cpu")
    of_model = {"quantization": "int4", "quantization_group_size": 64, "quantization_head": "int8"}
    one = found(directory, asked, **of_model).rounded(cpu, torch.bfloat16)
    assert one.config.quantization == {None: "int4", "none": None, "int8": "int8"}[asked]
    assert one.config.quantization_group_size == (64 if asked is None else None)
    plain = found(directory, asked, keep_weights_twice=True)
    for dtype, kind in ((torch.bfloat16, "int8_w8a8"), (torch.float32, None)):
        own = plain.rounded(cpu, dtype).config
        assert own.quantization == {None: kind, "none": None, "int8": "int8"}[asked]
        assert own.keep_weights_twice == (own.quantization is None)
    assert plain.rounded(torch.device("cuda"), torch.bfloat16) is plain


def test_another_quantisation_than_that_of_its_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = mtp_checkpoint("qwen3-next")
    target = dataclasses.replace(model_config(directory, "auto"), published='{"quant_method": "fp8"}')
    with pytest.raises(ValueError, match="must be left out for method 'mtp' where the checkpoint is quantised"):
        draft_checkpoint(arguments(directory, "int8"), target, None)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek-v3", "num_nextn_predict_layers"),
        ("glm4-moe", "num_nextn_predict_layers"),
        ("qwen3-next", "num_nextn_predict_layers"),
        ("qwen3.5", "mtp_num_hidden_layers"),
        ("qwen3.5-moe", "mtp_num_hidden_layers"),
    ],
)
def test_models_that_have_none_or_several_by_their_config_are_refused(name: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"models with one layer .*{field}.*, given 0: it has none\. Choose another"):
        found(write_checkpoint(name, tmp_path / "none", {}, **{field: 0}))
    with pytest.raises(ValueError, match=r"given 3: publishers do not agree on how several go on\. Choose another"):
        found(write_checkpoint(name, tmp_path / "several", {}, **{field: 3}))


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"checkpoints of {', '.join(FAMILIES)} have, given LlamaForCausalLM"):
        found(checkpoint("llama"))


def test_gguf_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_llm.checkpoint.mtp.has_index", lambda directory: True)
    with pytest.raises(ValueError, match="method 'mtp' reads safetensors, given a GGUF file"):
        found(mtp_checkpoint("glm4-moe"))


def test_check_counts_it_and_looks_for_its_tensors(tmp_path: Path) -> None:
    rows = dict(look_at(arguments(mtp_checkpoint("qwen3.5"), **SIZES)))
    assert rows["draft model"].startswith("Qwen3_5ForCausalLM.mtp, 1 layers, hidden size 112, 6 heads and 2 KV heads")
    # 144 columns of queries and as many of gates, 48 of keys and of values, out of 144; the MLP; the projection; norms.
    size = 4 * (112 * (2 * 144 + 2 * 48) + 144 * 112 + 3 * 112 * 160 + 2 * 112 * 112 + 2 * 24 + 5 * 112)
    assert (
        f"; {size / 2**20:,.1f} MiB in memory; KV cache float32, 384 bytes a token, and 448 of the"
        in rows["draft model"]
    )
    assert "note" not in rows
    tensors = {name: value for name, value in mtp_tensors("qwen3.5").items() if name != "mtp.fc.weight"}
    with pytest.raises(ValueError, match=r"missing: mtp\.fc\.weight"):
        list(look_at(arguments(write_checkpoint("qwen3.5", tmp_path, tensors), **SIZES)))
