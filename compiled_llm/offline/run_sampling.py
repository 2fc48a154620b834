"""The sampling parameters of a run: those that are given, else those that the checkpoint suggests, else ours."""

from collections.abc import Mapping
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.checkpoint.generation_config import default_sampling_params, listed, suggested_sampling, with_room
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.offline.flags import DEFAULT_SAMPLING


def run_sampling(config: EngineConfig, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Arguments of ``SamplingParams``, and a text of them that names generation_config.json where it decides.

    Raises:
        ValueError: they do not go together.
    """
    suggested = suggested_sampling(checkpoint_directory(config))
    suggested = {name: value for name, value in suggested.items() if name not in given}
    default_sampling_params(suggested)  # its error message names the file
    room = with_room(suggested, int(DEFAULT_SAMPLING["max_tokens"]))
    sampling = {**DEFAULT_SAMPLING, **room, **given}
    SamplingParams(**sampling)
    others = {name: sampling[name] for name in {**DEFAULT_SAMPLING, **given} if name not in suggested}
    parts = [listed(others)] + [f"by generation_config.json: {listed(suggested)}"] * bool(suggested)
    return sampling, "; ".join(filter(None, parts))
