"""ModelConfig: what a forward needs to know of a checkpoint, from its Hugging Face ``config.json``.

Every field of the file is looked at (``config_fields.py`` says how): one that this engine does not understand and
transformers does is refused by name, since to ignore it in silence would mean wrong tokens.
"""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import transformers

from compiled_llm.models import SUPPORTED, family
from compiled_llm.models.config_fields import ignored_fields, used_fields
from compiled_llm.models.files import read_json, read_optional_json
from compiled_llm.models.rope_config import Llama3RopeScaling, read_rope

_DTYPES = ("float32", "bfloat16", "float16")
# The largest value of each size. Checked before transformers sees them: its classes make lists of some lengths.
_MOST = {
    "num_hidden_layers": 1024,
    "head_dim": 2**16,
    "hidden_size": 2**24,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "vocab_size": 2**24,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model's shape. Hashable, so a graph may be keyed by it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        family(self.architecture)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads must be a multiple of num_key_value_heads, given {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim must be even (rotary embedding), given {self.head_dim}")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"config.json: rms_norm_eps must be a number of at least 0, given {self.rms_norm_eps}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"config.json: dtype must be one of {', '.join(_DTYPES)}, given {self.dtype!r:.100}")

    @property
    def qkv_features(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read ``config.json`` (and the end-of-text ids of ``generation_config.json``) of a model directory.

        Warns of the fields that are ignored, once for all of them.

        Raises:
            ValueError: a file is missing or not JSON, or a field is not supported; the message names it.
        """
        config = read_json(directory / "config.json")
        generation = read_optional_json(directory / "generation_config.json")
        made = cls.from_dict(config, generation)
        ignored = ignored_fields(config, _config_class(made.architecture))
        if ignored:
            shown = f"{', '.join(ignored):.1000}"
            warnings.warn(
                f"{directory / 'config.json'}: fields that transformers ignores for {made.architecture} are ignored "
                f"here too: {shown}",
                stacklevel=2,
            )
        return made

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """The same from parsed JSON, without the warning. Fields that are left out take transformers' defaults."""
        architecture = _architecture(config)
        config_class = _config_class(architecture)
        model_type = config.get("model_type", config_class.model_type)
        if model_type != config_class.model_type:
            raise ValueError(
                f"config.json: model_type must be {config_class.model_type!r} where architectures is "
                f"[{architecture!r}], given {model_type!r:.100}. {SUPPORTED}"
            )
        ignored_fields(config, config_class)
        rope = read_rope(config)
        used = used_fields(config, config_class)
        for name in _MOST.keys() & used.keys():
            if used[name] is not None:
                _check_size(name, used[name])
        try:
            # transformers fills in the defaults of fields that the file leaves out.
            full = config_class(**used)
            rms_norm_eps = float(full.rms_norm_eps)
        except Exception as error:  # a wrong type meets transformers' own validation, in whatever exception it uses
            raise ValueError(f"config.json: {type(error).__name__}: {error!s:.500}") from error
        head_dim = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
        _check_size("head_dim", head_dim)
        for name in _MOST.keys() - {"head_dim"}:
            _check_size(name, getattr(full, name))
        return cls(
            architecture=architecture,
            vocab_size=full.vocab_size,
            hidden_size=full.hidden_size,
            intermediate_size=full.intermediate_size,
            num_layers=full.num_hidden_layers,
            num_heads=full.num_attention_heads,
            num_kv_heads=full.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=rms_norm_eps,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            max_position_embeddings=full.max_position_embeddings,
            tie_word_embeddings=bool(full.tie_word_embeddings),
            attention_bias=bool(getattr(full, "attention_bias", False)),
            mlp_bias=bool(getattr(full, "mlp_bias", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=_eos_token_ids(config, generation or {}, full.vocab_size),
        )


def _architecture(config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ValueError(
            f"config.json: architectures must be a list with one name, given {architectures!r:.200}. {SUPPORTED}"
        )
    return architectures[0]


def _config_class(architecture: str) -> Any:
    return getattr(transformers, family(architecture).HF_CONFIG)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST[name]:
        raise ValueError(f"config.json: {name} must be an integer from 1 to {_MOST[name]}, given {value!r:.100}")


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    ids = set()
    for name, source in (("config.json", config), ("generation_config.json", generation)):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: eos_token_id must be a token id or a list of them, from 0 to {vocab_size - 1} (one below "
                    f"config.json's vocab_size), given {value!r:.200}"
                )
            ids.add(token)
    return tuple(sorted(ids))
