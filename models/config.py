"""ModelConfig: what a forward needs to know of a checkpoint, from its Hugging Face ``config.json``.

Every field of the file is looked at. It is used, or known to change nothing in inference, or required to hold the one
value that is supported, or refused by name: a field that would be ignored in silence would mean wrong tokens.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import transformers

from compiled_llm.models import ARCHITECTURES, family

# Fields that say nothing about the function computed from tokens to logits.
_NO_EFFECT = {
    "_name_or_path",
    "architectures",  # read beforehand
    "attention_dropout",
    "auto_map",  # names code in the directory; never followed
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_window_layers",  # without use_sliding_window, which is required to be off
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # changes the order of a sum, not the function
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_USED = {
    "attention_bias",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
}
# Fields that may stand in the file with the one value that the forwards implement.
_REQUIRED = {
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
}
_MAX_LAYERS = 1024
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """``rope_type: "llama3"`` of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise ValueError(f"config.json: {name} must be a positive integer, given {value!r}")
        if self.num_layers > _MAX_LAYERS:
            raise ValueError(f"config.json: num_hidden_layers must be at most {_MAX_LAYERS}, given {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads must be a multiple of num_key_value_heads, given {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim must be even (rotary embedding), given {self.head_dim}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"config.json: dtype must be one of {', '.join(_DTYPES)}, given {self.dtype!r}")

    @property
    def qkv_features(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read ``config.json`` (and the end-of-text ids of ``generation_config.json``) of a model directory.

        Raises:
            ValueError: a file is missing or not JSON, or a field is not supported; the message names it.
        """
        config = read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(config, generation)

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """The same from parsed JSON. Fields that the file leaves out take transformers' defaults."""
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
            raise ValueError(
                f"config.json: architectures must be a list with one name, given {config.get('architectures')!r}. "
                f"Supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        architecture = architectures[0]
        module = family(architecture)
        _refuse_unknown(config)

        rope = _rope_parameters(config)
        # transformers fills in the defaults of fields that the file leaves out, for the family's own class alone.
        known = {name: value for name, value in config.items() if name in _USED}
        for name in ("rope_theta", "rope_scaling", "rope_parameters"):
            known.pop(name, None)
        try:
            full = getattr(transformers, module.HF_CONFIG)(**known)
        except Exception as error:  # a wrong type meets transformers' own validation, in whatever exception it uses
            raise ValueError(f"config.json: {type(error).__name__}: {error}") from error
        head_dim = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
        return cls(
            architecture=architecture,
            vocab_size=full.vocab_size,
            hidden_size=full.hidden_size,
            intermediate_size=full.intermediate_size,
            num_layers=full.num_hidden_layers,
            num_heads=full.num_attention_heads,
            num_kv_heads=full.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=float(full.rms_norm_eps),
            rope_theta=_rope_theta(config, rope),
            rope_scaling=_rope_scaling(rope),
            max_position_embeddings=full.max_position_embeddings,
            tie_word_embeddings=bool(full.tie_word_embeddings),
            attention_bias=bool(getattr(full, "attention_bias", False)),
            mlp_bias=bool(getattr(full, "mlp_bias", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=_eos_token_ids(config, generation or {}),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; ``ValueError`` names the file when it is missing, unreadable or something else."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: must hold a JSON object, found {type(parsed).__name__}")
    return parsed


def _refuse_unknown(config: dict[str, Any]) -> None:
    for name, value in config.items():
        if name in _REQUIRED:
            if value not in _REQUIRED[name] and not (name == "sliding_window" and not config.get("use_sliding_window")):
                raise ValueError(f"config.json: {name}={value!r} is not supported; allowed: {_REQUIRED[name][0]!r}")
        elif name == "layer_types":
            if not isinstance(value, list) or any(kind != "full_attention" for kind in value):
                raise ValueError(f"config.json: layer_types may hold 'full_attention' only, given {value!r}")
        elif name not in _NO_EFFECT and name not in _USED:
            raise ValueError(
                f"config.json: the field {name!r} is not understood, so the model might compute something else. "
                "Remove it if it does not change the function from tokens to logits."
            )


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; earlier checkpoints have rope_scaling beside rope_theta.
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, given {rope!r}")
    if new and old and new != old:
        raise ValueError(f"config.json: rope_parameters and rope_scaling contradict each other: {new!r} and {old!r}")
    if "rope_theta" in rope and config.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        raise ValueError(f"config.json: rope_theta is both {config['rope_theta']!r} and {rope['rope_theta']!r}")
    return rope


def _rope_theta(config: dict[str, Any], rope: dict[str, Any]) -> float:
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ValueError(f"config.json: rope_theta must be a positive number, given {theta!r}")
    return float(theta)


def _rope_scaling(rope: dict[str, Any]) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields = {name: value for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta")}
    if kind == "default" and not fields:
        return None
    expected = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    if kind == "llama3" and set(fields) == expected:
        try:
            scaling = Llama3RopeScaling(**{name: float(value) for name, value in fields.items()})  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"config.json: rope scaling holds something else than numbers: {fields!r}") from error
        if (
            all(0 < value < math.inf for value in dataclasses.astuple(scaling))
            and scaling.high_freq_factor > scaling.low_freq_factor
        ):
            return scaling
    raise ValueError(
        f"config.json: rope scaling {rope!r} is not supported; allowed: rope_type 'default' with no other field, or "
        f"'llama3' with positive {', '.join(sorted(expected))} and high_freq_factor above low_freq_factor"
    )


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    ids = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool):
                ids.add(token)
            elif token is not None:
                raise ValueError(f"eos_token_id must be an integer or a list of them, given {value!r}")
    return tuple(sorted(ids))
