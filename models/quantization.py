"""What ``quantization_config`` of a ``config.json`` says: how which of the weights are kept in the checkpoint."""

from collections.abc import Collection
from typing import Any

from compiled_llm.models.encoding import Quantization
from compiled_llm.models.registry import SUPPORTED

_MOST_PATTERNS = 1000
_REGEX = set("\\^$+?{}[]()|")  # what a pattern may not have: it is matched as transformers does without these


def read_quantization(config: dict[str, Any], methods: Collection[str]) -> Quantization | None:
    """``quantization_config`` of a parsed ``config.json``; None where there is none.

    Args:
        methods: those that the family's weights may be kept in.

    Raises:
        ValueError: it is not one of ``methods``, or has a field that is not known.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not isinstance(method, str) or method not in methods:
        allowed = f"quant_method {' or '.join(map(repr, methods))}" if methods else "no quantization_config"
        raise ValueError(
            f"config.json: quantization_config={given!r:.200} is not supported: {config.get('architectures')!r:.100} "
            f"is read with {allowed}. {SUPPORTED}"
        )
    # dequantize is what transformers is to do at a load, and what is done here.
    unknown = sorted(given.keys() - {"quant_method", "modules_to_not_convert", "dequantize"})
    if unknown:
        raise ValueError(
            f"config.json: {unknown[0]!r:.100} of quantization_config is not supported with quant_method {method!r}; "
            "supported: modules_to_not_convert, dequantize"
        )
    return Quantization(method, _patterns(given.get("modules_to_not_convert")))


def _patterns(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if (
        not isinstance(given, list)
        or len(given) > _MOST_PATTERNS
        or any(not isinstance(pattern, str) or not pattern or _REGEX & set(pattern) for pattern in given)
    ):
        raise ValueError(
            f"config.json: modules_to_not_convert of quantization_config must be a list of at most {_MOST_PATTERNS} "
            f"names of modules, in which * stands for anything, given {given!r:.200}"
        )
    return tuple(given)
