"""Checks of what a row brings, in any format."""

from collections.abc import Mapping
from typing import Any

from compiled_llm.error_texts import shown
from compiled_llm.sampling_params import SamplingParams

_MOST_ID_CHARACTERS = 512
_OF_THE_RUN = {"output_kind": "an offline run writes whole results"}
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
    """Sampling parameters of a row. ``ValueError`` as ``SamplingParams`` raises it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"sampling_params must be a JSON object, given {shown(values)}")
    for name, reason in _OF_THE_RUN.items():
        if name in values:
            raise ValueError(f"{name} must be left out of a row: {reason}")
    SamplingParams(**values)
    return dict(values)


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
