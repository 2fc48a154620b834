"""Checks of what a row brings, in any format."""

from collections.abc import Mapping
from typing import Any

from compiled_llm.api.error_texts import shown
from compiled_llm.api.sampling_params import SamplingParams

_MOST_ID_CHARACTERS = 512
_OF_THE_RUN = {"output_kind": "an offline run writes whole results"}
# A variable of templates that OpenAI's API has as a field of its own.
_EFFORT = "reasoning_effort"
CHAT_OPTIONS = (
    *("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    _EFFORT,
)
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
}


def check_custom_id(value: Any) -> str | None:
    """``ValueError`` unless it is None or a short string."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MOST_ID_CHARACTERS):
        raise ValueError(
            f"custom_id must be a non-empty str of at most {_MOST_ID_CHARACTERS} characters, given {shown(value)}"
        )
    return value


def checked_sampling(values: Any) -> dict[str, Any]:
    """Sampling parameters of a row. ``ValueError`` as ``SamplingParams`` raises it.

    Whether they go together with those of the run is known where the row is served. Empty stop strings, with which
    clients say that there is none, are left out.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"sampling_params must be a JSON object, given {shown(values)}")
    for name, reason in _OF_THE_RUN.items():
        if name in values:
            raise ValueError(f"{name} must be left out of a row: {reason}")
    sampling, stop = dict(values), values.get("stop")
    if stop == "":
        sampling["stop"] = None
    elif isinstance(stop, list):
        sampling["stop"] = [text for text in stop if text != ""]
    SamplingParams(**{"max_tokens": None, **sampling})  # min_tokens is for the run's max_tokens to allow
    return sampling


def chat_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``CompiledEngine.encode_chat`` among ``values``, whose nulls are as no key.

    Raises:
        ValueError: two of them contradict each other.
    """
    options = {key: values[key] for key in CHAT_OPTIONS if key != _EFFORT and values.get(key) is not None}
    effort = values.get(_EFFORT)
    if effort is None:
        return options
    if not isinstance(effort, str):
        raise ValueError(f"{_EFFORT} must be a str, such as 'low', given {shown(effort)}")
    variables = options.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        return options  # the chat template's code says what is wrong with them
    if variables.get(_EFFORT, effort) != effort:
        raise ValueError(
            f"{_EFFORT} must be the same in chat_template_kwargs, or be given once, given {shown(effort)} and "
            f"{shown(variables[_EFFORT])}"
        )
    return {**options, "chat_template_kwargs": {**variables, _EFFORT: effort}}


def check_messages(messages: Any) -> list[Any]:
    """``ValueError`` for what is no list, and for images and the like. The chat template's code checks the rest."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages must be a list of one or more objects with role and content, given {shown(messages)}"
        )
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _MEDIA:
                raise ValueError(f"{_MEDIA[kind]} are not served: messages[{number}] has a part of type {kind!r}")
    return messages
