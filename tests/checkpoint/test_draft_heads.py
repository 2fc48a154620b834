"""Which heads may draft for a model, and why others may not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.draft_model import draft_checkpoint
from compiled_llm.checkpoint.eagle3 import eagle3_config
from compiled_llm.checkpoint.medusa import medusa_config
from compiled_llm.checkpoint.model_files import model_config
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import checked_ids
from tests.draft_heads import HEAD_CONFIG, eagle3_tensors, medusa_tensors, write_head
from tests.families import checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
OF_AUTHORS = {**HEAD_CONFIG, "draft_vocab_size": 90}
OF_LIBRARY = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": HEAD_CONFIG,
    "norm_before_residual": True,
    "draft_vocab_size": 90,
}


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return model_config(checkpoint("llama"))


def test_layers_are_those_whose_inputs_are_read(target: ModelConfig) -> None:
    """Beside ``eagle_config``, that is: within it they are those whose outputs are, one less each."""
    assert eagle3_config(OF_LIBRARY | {IDS: [0, 1, 2]}, None, target).layer_ids == (0, 1, 2)
    assert eagle3_config(OF_AUTHORS | {"eagle_config": {IDS: [0, 1]}}, None, target).layer_ids == (1, 2)
    deep = dataclasses.replace(target, num_layers=30)
    assert eagle3_config(OF_AUTHORS, None, deep).layer_ids == (2, 15, 27)
    with pytest.raises(ValueError, match=r"look like those whose inputs are. Give such beside eagle_config"):
        eagle3_config(OF_AUTHORS | {"eagle_config": {IDS: [2, 15, 27]}}, None, deep)


def test_what_files_lack_is_the_models(target: ModelConfig) -> None:
    names = {*eagle3_tensors(), "embed_tokens.weight"}
    found = eagle3_config(OF_AUTHORS | {IDS: [0, 1]}, names, target)
    assert (found.has_embedding, found.has_head, found.first_layer) == (True, True, "midlayer")
    assert found.norm_before_residual is False
    found = eagle3_config(OF_LIBRARY | {IDS: [0, 1], "draft_vocab_size": 307}, {"fc.weight"}, target)
    assert (found.has_embedding, found.has_head, found.first_layer) == (False, False, "layers.0")
    assert found.norm_before_residual is True
    assert (
        medusa_config({"medusa_num_heads": 2, "medusa_num_layers": 1}, {"0.0.linear.weight"}, target).head_names == ()
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**OF_LIBRARY, "norm_before_residual": None, "drop": "norm_before_residual"}, "norm_before_residual must be"),
        ({**OF_LIBRARY, "speculators_model_type": "dflash"}, "speculators_model_type must be 'eagle3', given 'dflash'"),
        ({**OF_AUTHORS, "model_type": "deepseek_v3"}, "model_type must be 'llama', given 'deepseek_v3'"),
        ({**OF_AUTHORS, "eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm must be False, given True"),
        ({**OF_AUTHORS, IDS: [2, 1]}, f"{IDS} must be numbers of layers, ascending, given"),
        ({**OF_AUTHORS, IDS: [1], "eagle_config": {IDS: [1]}}, f"{IDS} must be given once"),
        ({**OF_AUTHORS, "target_hidden_size": 64}, "target_hidden_size must be 112, the model's, given 64"),
        ({**OF_AUTHORS, "vocab_size": 300}, "vocab_size must be 307, the model's, given 300"),
        ({**OF_AUTHORS, "draft_vocab_size": 400}, "draft_vocab_size must be from 1 to 307, given 400"),
        ({**OF_AUTHORS, "norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm must not both be true"),
        ({**OF_AUTHORS, "hidden_size": 64}, "hidden_size must be 112, the model's, whose embed_tokens"),
    ],
)
def test_eagle3_heads_that_are_not_served(config: dict[str, Any], text: str, target: ModelConfig) -> None:
    config = {IDS: [0, 1]} | config
    config.pop(config.pop("drop", ""), None)
    with pytest.raises(ValueError, match=text):
        eagle3_config(config, None, target)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads must be from 1 to 64, given 0"),
        ({"num_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}, "vocab_size must be 307, the model's, given 9"),
        ({"num_heads": 2, "num_hidden_layers": 1, "truncated_vocab_size": 400}, "truncated_vocab_size must be from 1"),
    ],
)
def test_medusa_heads_that_are_not_served(config: dict[str, Any], text: str, target: ModelConfig) -> None:
    with pytest.raises(ValueError, match=text):
        medusa_config(config, None, target)


def test_more_drafts_than_heads_layers_that_are_not_there_and_pickled_files(tmp_path: Path) -> None:
    def check(method: str, directory: Path, number: int = 3) -> None:
        wanted = {"method": method, "model": str(directory), "num_speculative_tokens": number}
        config = EngineConfig(model=str(checkpoint("llama")), speculative_config=wanted)
        draft_checkpoint(config, model_config(checkpoint("llama")), None)

    write_head(tmp_path / "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 2}, medusa_tensors())
    check("medusa", tmp_path / "medusa")
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be at most 3, the heads of .*, given 4"):
        check("medusa", tmp_path / "medusa", 4)
    write_head(tmp_path / "eagle", HEAD_CONFIG, eagle3_tensors())  # the usual layers of a model of two
    with pytest.raises(ValueError, match="must be numbers of layers, ascending"):
        check("eagle3", tmp_path / "eagle")
    write_head(tmp_path / "far", {**HEAD_CONFIG, IDS: [0, 5]}, eagle3_tensors(taps=2))
    with pytest.raises(ValueError, match=r"reads layers \[0, 5\], and LlamaForCausalLM has 2"):
        check("eagle3", tmp_path / "far")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    (pickled / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tensors in safetensors files, given .*medusa_lm_head.pt. To convert it"):
        check("medusa", pickled)


def test_ids_of_tokens_that_are_none_are_refused() -> None:
    assert checked_ids("d2t", torch.tensor([0, 306]), 307).tolist() == [0, 306]
    for wrong in ([-1, 3], [0, 307]):
        with pytest.raises(ValueError, match="d2t must have ids of tokens, 0 to 306, given others"):
            checked_ids("d2t", torch.tensor(wrong), 307)
