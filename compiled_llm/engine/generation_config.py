"""How a checkpoint suggests to sample: its ``generation_config.json``, checked like what a user gives."""

from pathlib import Path
from typing import Any

from compiled_llm.models.files import read_optional_json
from compiled_llm.sampling_params import SamplingParams

# Field of the file -> sampling parameter. Its end-of-text ids are the model's (models/config.py); other fields say how
# transformers generates.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def suggested_sampling(directory: Path) -> dict[str, Any]:
    """Sampling parameters that a model directory suggests, by name, as its file has them; empty if it suggests none.

    ``do_sample: false`` is ``temperature=0``.

    Raises:
        ValueError: the file is not JSON.
    """
    fields = read_optional_json(directory / "generation_config.json")
    suggested = {ours: fields[name] for name, ours in _PARAMETERS.items() if fields.get(name) is not None}
    return suggested | ({"temperature": 0} if fields.get("do_sample") is False else {})


def default_sampling_params(suggested: dict[str, Any]) -> SamplingParams:
    """``suggested`` as parameters; the others have their usual defaults.

    Raises:
        ValueError: a value is out of range.
    """
    try:
        return SamplingParams(**suggested)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}: give sampling_params of your own") from error


def listed(parameters: dict[str, Any]) -> str:
    """``temperature=0.6, top_k=20``"""
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items())
