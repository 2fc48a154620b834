"""What lm-eval asks of a model, in the engine's terms. Plain Python, without lm-eval."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments in which a config differs from the default, less the device, which lm-eval has a flag for.

    lm-eval calls the model ``pretrained``.
    """
    changed = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default and field.name != "device"
    }
    return {"pretrained" if name == "model" else name: value for name, value in changed.items()}


def cut_context(context: Sequence[int], continuation: Sequence[int], most: int) -> list[int]:
    """The end of ``context`` that leaves both together no more than ``most`` tokens.

    Raises:
        ValueError: no token of the context would be left.
    """
    room = most - len(continuation)
    if room < 1:
        raise ValueError(
            f"a continuation must have at most {most - 1} tokens, which leaves one of its context, given "
            f"{len(continuation)}: raise max_model_len"
        )
    return list(context[-room:])


def sampling_params(arguments: Mapping[str, Any], stops: Sequence[str], max_tokens: int) -> SamplingParams:
    """The parameters for a request of ``generate_until``.

    Args:
        arguments: those of the task, less the stops and the number of tokens. With ``do_sample`` the temperature is 1
            unless it is given, else 0.

    Raises:
        ValueError, TypeError: the engine has no such parameter, or not this value; the message says what it has.
    """
    options = dict(arguments)
    samples = options.pop("do_sample", False)
    options.setdefault("temperature", 1.0 if samples else 0.0)
    return SamplingParams(stop=tuple(stop for stop in stops if stop), max_tokens=max_tokens, **options)
