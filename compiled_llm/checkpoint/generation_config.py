"""How a checkpoint suggests to sample: its ``generation_config.json``, checked like what a user gives.

Each field of the file is of one of four kinds:

    served       a sampling parameter does what it does: ``suggested_sampling`` has it
    off          its value asks for nothing
    no effect    it changes no token here, whatever its value
    not served   all others, also fields that transformers does not know: the start names them (``warn_of_unserved``)
"""

from pathlib import Path
from typing import Any

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.models.files import read_optional_json
from compiled_llm.ops.user_warnings import warn

# Field of the file -> sampling parameter. Its end-of-text ids are the model's (models/config_sizes.py).
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "num_return_sequences": "n",
    "sequence_bias": "logit_bias",
}
# Values that ask for nothing, besides null, false and what is empty.
_OFF: dict[str, tuple[Any, ...]] = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "max_length": (20,),  # transformers' default, which says nothing of a model
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
}
_NO_EFFECT = {
    "_from_model_config",
    "assistant_confidence_threshold",  # this and the like: of a second model that guesses tokens
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",  # how keys and values are kept: engine arguments say it here
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",  # of models with an encoder
    "disable_compile",
    "do_sample",  # read by itself
    "diversity_penalty",  # this, groups, early_stopping and length_penalty: of beams, which num_beams asks for
    "early_stopping",
    "eos_token_id",  # read with the model's config
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",  # guessed tokens, which are the ones that would have come
    "remove_invalid_values",  # logits that are no numbers end a request
    "renormalize_logits",  # which changes no probability
    "return_dict_in_generate",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
    "use_mtp",
}


def suggested_sampling(directory: Path) -> dict[str, Any]:
    """Sampling parameters that a model directory suggests, by name, as its file has them; empty if it suggests none.

    ``do_sample: false`` is ``temperature=0``.

    Raises:
        ValueError: the file is not JSON.
    """
    return {_PARAMETERS[name]: value for name, value in _served(_fields(directory)).items()}


def warn_of_unserved(directory: Path, max_model_len: int) -> None:
    """Name the fields of a model directory's file that would change tokens and are not served, in one warning."""
    fields = _fields(directory)
    known = _served(fields).keys() | _NO_EFFECT
    left = {name: value for name, value in fields.items() if name not in known and not _is_off(name, value)}
    longest = left.get("max_length")
    if isinstance(longest, int) and longest >= max_model_len:
        del left["max_length"]  # no text is longer
    if left:
        warn(
            f"{directory / 'generation_config.json'}: fields for which there is no sampling parameter are ignored: "
            f"{listed(left):.1000}"
        )


def default_sampling_params(suggested: dict[str, Any]) -> SamplingParams:
    """``suggested`` as parameters; all others have their usual defaults.

    Raises:
        ValueError: a value is out of range.
    """
    try:
        return SamplingParams(**with_room(suggested, SamplingParams.max_tokens))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}: give sampling_params of your own") from error


def with_room(arguments: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """``arguments`` of ``SamplingParams``, with ``max_tokens`` as default, or ``min_tokens`` where that is more."""
    least = arguments.get("min_tokens")
    if isinstance(least, int) and max_tokens is not None:
        max_tokens = max(max_tokens, least)
    return {"max_tokens": max_tokens, **arguments}


def listed(parameters: dict[str, Any]) -> str:
    """``temperature=0.6, top_k=20``"""
    return ", ".join(f"{name}={value!r:.200}" for name, value in parameters.items())


def _fields(directory: Path) -> dict[str, Any]:
    return read_optional_json(directory / "generation_config.json")


def _served(fields: dict[str, Any]) -> dict[str, Any]:
    """The ``fields`` that are sampling parameters, with their values."""
    served = {name: fields[name] for name in _PARAMETERS if not _is_off(name, fields.get(name))}
    if fields.get("do_sample") is False:
        served["temperature"] = 0
        served.pop("num_return_sequences", None)  # of beams: one token is the most likely
    if "sequence_bias" in served:
        biases = _token_biases(served.pop("sequence_bias"))
        served |= {} if biases is None else {"sequence_bias": biases}
    return served


def _token_biases(sequences: Any) -> dict[int, float] | None:
    """Token id -> bias of ``[[ids, bias], ...]``; None where ids are several, or a bias is out of range."""
    try:
        biases = {ids[0]: bias for ids, bias in sequences if len(ids) == 1}
        SamplingParams(logit_bias=biases)
    except (TypeError, ValueError, LookupError):
        return None
    return biases if len(biases) == len(sequences) else None


def _is_off(name: str, value: Any) -> bool:
    if value is None or value is False or value in ([], {}, ""):
        return True
    return not isinstance(value, bool) and value in _OFF.get(name, ())
