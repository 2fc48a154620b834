"""Which checkpoints may draft for a model, and why others may not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.draft_model import draft_checkpoint
from compiled_llm.checkpoint.model_files import DEMO_MODEL, load_tokenizer, model_config
from tests.families import checkpoint


def check(target: Path, draft_model: Path, **arguments: Any) -> Any:
    method = {"method": "draft_model", "model": str(draft_model)}
    config = EngineConfig(model=str(target), speculative_config=method, **arguments)
    return draft_checkpoint(config, model_config(target), load_tokenizer(config, target))


def copy_of_demo(directory: Path, change: Any) -> Path:
    """The demo model's small files, of which ``change`` changes the parsed ``tokenizer.json``."""
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    parsed = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    change(parsed)
    (directory / "tokenizer.json").write_text(json.dumps(parsed))
    return directory


def test_other_methods_have_none() -> None:
    config = EngineConfig(speculative_config={"method": "ngram"})
    assert draft_checkpoint(config, model_config(DEMO_MODEL), None) is None
    assert draft_checkpoint(EngineConfig(), model_config(DEMO_MODEL), None) is None


def test_it_has_the_dtype_of_the_model_and_nothing_of_its_quantisation() -> None:
    found = check(DEMO_MODEL, DEMO_MODEL, quantization="int8", quantization_skip=("lm_head",), dtype="float32")
    assert (found.config.quantization, found.config.quantization_skip, found.config.dtype) == (None, (), "float32")
    assert (found.num_tokens, found.config.speculative_config) == (4, None)
    assert check(checkpoint("llama"), checkpoint("llama")).config.dtype == "float32"


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    def exchange(parsed: dict[str, Any]) -> None:
        vocabulary = parsed["model"]["vocab"]
        by_id = {token_id: token for token, token_id in vocabulary.items()}
        vocabulary[by_id[300]], vocabulary[by_id[290]] = 290, 300

    other = copy_of_demo(tmp_path / "exchanged", exchange)
    with pytest.raises(
        ValueError, match=r"must have the vocabulary of the model, given .*: token 290 is '.*' there and"
    ):
        check(DEMO_MODEL, other)

    def shorten(parsed: dict[str, Any]) -> None:
        by_id = {token_id: token for token, token_id in parsed["model"]["vocab"].items()}
        last = by_id[4095]
        del parsed["model"]["vocab"][last]
        merges = parsed["model"]["merges"]
        parsed["model"]["merges"] = [
            m for m in merges if (m if isinstance(m, str) else " ".join(m)).replace(" ", "") != last
        ]

    other = copy_of_demo(tmp_path / "shorter", shorten)
    with pytest.raises(ValueError, match=r"token 4095 is none there and '.*' here"):
        check(DEMO_MODEL, other)


def test_without_tokenizers_sizes_are_compared() -> None:
    assert check(checkpoint("llama"), checkpoint("qwen2")).model_config.architecture == "Qwen2ForCausalLM"
    with pytest.raises(ValueError, match=r"must have the vocabulary of the model, 307 tokens, given .* with 501"):
        check(checkpoint("llama"), checkpoint("llama-rope3-tied"))
    with pytest.raises(ValueError, match=r"must have the vocabulary of the model, 4096 tokens, given .* with 307"):
        check(DEMO_MODEL, checkpoint("llama"))


def test_layers_with_a_state_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model must have attention in all layers, given .*Qwen3Next"):
        check(checkpoint("llama"), checkpoint("qwen3-next"))


def test_a_model_with_an_embedding_for_each_position_must_be_long_enough() -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at most \d+ with the draft model"):
        check(checkpoint("llama"), checkpoint("gpt2"), max_model_len=2000)


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"speculative_config: model='/no/such'"):
        check(DEMO_MODEL, Path("/no/such"))
