"""Where a model's files lie: in a directory, or in the cache of Hugging Face's hub, which they are downloaded to."""

import re
from pathlib import Path

# Configs, weights and chat templates, of which a hub's model may hold copies in other formats.
_DATA_FILES = ("*.json", "*.safetensors", "*.jinja")
_COPIES = ("*/*.json", "*/*.safetensors", "consolidated*")


def model_directory(model: str, revision: str | None = None, name: str = "model") -> Path:
    """The directory of a model: ``model`` itself, or the hub's snapshot of that id with data files alone.

    The hub is asked with the access token of the environment variable HF_TOKEN, or of ``hf auth login``.

    Args:
        revision: branch, tag or commit of a hub id; None: the main branch.
        name: of the argument, for messages.

    Raises:
        ValueError: it is neither, a directory is given a revision, or the hub does not give it; the message says what
            to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for a directory, such as {model!r}, given {revision!r}")
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ValueError(f"{name}={model!r} is neither a directory nor a hub id ('organisation/name')")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model, revision=revision, allow_patterns=list(_DATA_FILES), ignore_patterns=list(_COPIES)
        )
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
