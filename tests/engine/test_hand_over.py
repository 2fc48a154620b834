"""What tokens depend on, as one engine says it to another."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.engine.hand_over import token_key
from compiled_llm.models.config_file import read_config

MODEL = read_config(DEMO_MODEL)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def test_the_key_of_tokens_is_of_what_changes_them() -> None:
    config, device = EngineConfig(), torch.device("cpu")
    key = token_key(config, MODEL, device, 1, b"a tokenizer")
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert token_key(config, MODEL, device, 1, b"a tokenizer") == key, "the engine has threads of its own"
    assert token_key(EngineConfig(max_model_len=64), MODEL, device, 1, b"a tokenizer") == key
    for other in (
        token_key(config, MODEL, device, 2, b"a tokenizer"),
        token_key(config, MODEL, device, 1, b"another"),
        token_key(config, dataclasses.replace(MODEL, hidden_size=8), device, 1, b"a tokenizer"),
        token_key(EngineConfig(split_special_tokens=True), MODEL, device, 1, b"a tokenizer"),
        token_key(EngineConfig(seed=1), MODEL, device, 1, b"a tokenizer"),
    ):
        assert other != key


def test_ranks_have_the_key_of_one_process_with_as_many_threads_as_each() -> None:
    """With exact sums their bits are the same, and without them no number of threads makes them so."""
    device = torch.device("cpu")
    exact, of_ranks = EngineConfig(tensor_parallel_exact=True), EngineConfig(tensor_parallel_size=2)
    key = token_key(dataclasses.replace(of_ranks, tensor_parallel_exact=True), MODEL, device, 2, b"a tokenizer")
    assert token_key(exact, MODEL, device, 1, b"a tokenizer") == key
    assert token_key(exact, MODEL, device, 2, b"a tokenizer") != key
    of_stages = EngineConfig(pipeline_parallel_size=4)
    key = token_key(of_stages, MODEL, device, 1, b"a tokenizer")
    assert token_key(of_stages, MODEL, device, 2, b"a tokenizer", 2) == key, "of two stages that compute at once"
    assert token_key(of_stages, MODEL, device, 2, b"a tokenizer") != key
    assert token_key(of_ranks, MODEL, device, 2, b"a tokenizer") != token_key(
        EngineConfig(), MODEL, device, 1, "a tokenizer"
    )
