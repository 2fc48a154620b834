"""The files that the arguments of an engine name, the model's and the tokenizer's: in a directory, or from the hub."""

import dataclasses
import os
import re
from pathlib import Path

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.gguf.directory import directory_of, has_index, is_gguf
from compiled_llm.checkpoint.kept_values import kept
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.text.tokenizer_files import files_of
from compiled_llm.text.tokenizer_parts import TokenizerParts, read_parts

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


def checkpoint_directory(config: EngineConfig, with_weights: bool = True) -> Path:
    """Where the files of the model lie; a hub's model is downloaded unless it was before.

    Args:
        with_weights: False downloads the small files alone.

    Raises:
        ValueError: there is no such model.
    """
    if config.model is None:
        return DEMO_MODEL
    return model_directory(config.model, config.revision, with_weights=with_weights)


def model_config(directory: Path, model_impl: str = "auto", dtype: str = "auto") -> ModelConfig:
    """What ``read_config`` returns for these arguments, kept on disk as long as the files do not change."""
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
    return Tokenizer(directory, kept("tokenizer", files_of(directory), lambda: _tokenizer_parts(directory)))


def _tokenizer_parts(directory: Path) -> TokenizerParts:
    """Of a GGUF file all files are our own, for transformers' general class, which changes nothing.

    That class is the one, since their ``config.json`` has no ``model_type``, which would name another.
    """
    return read_parts(directory, compare=not has_index(directory))


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


# -- Directories, and Hugging Face's hub


# Configs, weights and chat templates, of which a hub's model may hold copies in other formats.
_SMALL_FILES, _WEIGHTS = ("*.json", "*.jinja"), ("*.safetensors",)
_COPIES = ("*/*.json", "*/*.safetensors", "consolidated*")


def model_directory(model: str, revision: str | None = None, name: str = "model", with_weights: bool = True) -> Path:
    """The directory of a model: ``model`` itself, what a GGUF file is read as, or the hub's snapshot of that id.

    The hub is asked with the access token of the environment variable HF_TOKEN, or of ``hf auth login``.

    Args:
        revision: branch, tag or commit of a hub id; None: the main branch.
        name: of the argument, for messages.
        with_weights: False: of a hub's model, only what is not weights.

    Raises:
        ValueError: it is neither, a directory is given a revision, or the hub does not give it; the message says what
            to do.
    """
    path = Path(model).expanduser()
    if is_gguf(path):
        return directory_of(path)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for a directory, such as {model!r}, given {revision!r}")
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ValueError(f"{name}={model!r} is neither a directory, a .gguf file nor a hub id ('organisation/name')")
    from huggingface_hub import snapshot_download

    wanted = [*_SMALL_FILES, *(_WEIGHTS if with_weights else ())]
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=list(_COPIES))
    except Exception as error:  # of the network, the hub or the disk
        at = "" if revision is None else f", revision={revision!r}"
        raise ValueError(
            f"{name}={model!r}{at} is no directory here, nor to be had as a hub id: {_reason(error, model)}"
        ) from error
    return Path(found)


def _reason(error: Exception, model: str) -> str:
    """Why the hub did not give ``model``, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):  # before what it is a kind of
        return "its owners give it to accounts that accepted their terms: do so on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private: check the id, or set HF_TOKEN to an access token"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has that model, and no such branch, tag or commit of it"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        return (
            f"{why}, and {constants.HF_HUB_CACHE} has no copy of it: where there is a network, run `hf download "
            f"{model}` and copy what it makes, or give a directory. {str(error).splitlines()[0]:.300}"
        )
    return str(error)
