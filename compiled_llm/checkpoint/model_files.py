"""The files that the arguments of an engine name: those of the model, and the tokenizer."""

import dataclasses
import os
from pathlib import Path

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.hub import model_directory
from compiled_llm.checkpoint.kept_values import kept
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.text.tokenizer_files import files_of
from compiled_llm.text.tokenizer_parts import read_parts

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


def checkpoint_directory(config: EngineConfig) -> Path:
    """Where the files of the model lie; a hub's model is downloaded unless it was before.

    Raises:
        ValueError: there is no such model.
    """
    return DEMO_MODEL if config.model is None else model_directory(config.model, config.revision)


def model_config(directory: Path, model_impl: str = "auto", dtype: str = "auto") -> ModelConfig:
    """``read_config`` of the same arguments, from disk where an earlier start read the same files with the same."""
    files = [directory / "config.json", directory / "generation_config.json"]
    return kept(f"config-{model_impl}-{dtype}", files, lambda: read_config(directory, model_impl, dtype))


def has_tokenizer(config: EngineConfig, directory: Path) -> bool:
    """Whether prompts may be text. Costs nothing, so a program can ask before it starts an engine."""
    return config.tokenizer is not None or os.path.lexists(directory / "tokenizer.json")


def load_tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    """The tokenizer that ``config`` names, else that of the model in ``directory``; None where it has none."""
    if not has_tokenizer(config, directory):
        return None
    if config.tokenizer is not None:
        directory = model_directory(config.tokenizer, config.tokenizer_revision, "tokenizer")
    return Tokenizer(directory, kept("tokenizer", files_of(directory), lambda: read_parts(directory)))


def with_end_of_text(config: ModelConfig, tokenizer: Tokenizer) -> tuple[ModelConfig, list[str]]:
    """``config`` with the tokenizer's end-of-text token if it has none itself, and lines that say so."""
    token_id = tokenizer.eos_token_id
    if config.eos_token_ids or token_id is None or token_id >= config.vocab_size:
        return config, []
    name = tokenizer.named_tokens["eos_token"]
    line = (
        f"config.json and generation_config.json name no end-of-text token: the tokenizer's, {name!r}, ends an output"
    )
    return dataclasses.replace(config, eos_token_ids=(token_id,)), [line]
