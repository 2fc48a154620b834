"""PEFT's ``adapter_config.json``: which layers an adapter changes, their ranks and scales.

https://huggingface.co/docs/peft/package_reference/lora has the fields. A field that changes what a model computes is
followed or refused by name; so is one that is not known here and has a value.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_llm.api.readable import shown
from compiled_llm.models.files import read_json

CONFIG_FILE = "adapter_config.json"
MERGE = "merge the adapter into its model with PEFT (merge_and_unload), and serve that"
_READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "peft_type", "bias", "init_lora_weights", "target_parameters",
    "trainable_token_indices", "ensure_weight_tying", "peft_version", "base_model_name_or_path", "revision",
    "modules_to_save",
}  # fmt: skip
# What tells of the training, of the layout of the base model's weights, or of the files. None of it is needed to serve.
_NOT_NEEDED = {
    "auto_mapping", "corda_config", "ephemeral_gpu_offload", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "qalora_group_size",
    "runtime_config", "task_type",
}  # fmt: skip
_REFUSED = {
    "use_dora": f"a DoRA, whose magnitudes are of the changed weights: {MERGE}",
    "lora_bias": f"biases of its own: {MERGE}",
    "alora_invocation_tokens": "an activated LoRA, which begins within a prompt: there is no other way here",
    "layer_replication": f"repeated layers: {MERGE}",
    "use_qalora": f"pooled inputs: {MERGE}",
    "use_bdlora": f"block-diagonal matrices: {MERGE}",
    "arrow_config": "a router over adapters: serve one of these",
}
# Ways to start a training that leave the base model's weights as they are; others change them, which no file tells.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_MOST_ALPHA = 1e9
_MOST_REPETITIONS = 3  # of a pattern: with more, a short name may take long to compare


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """What a config says of ranks and scales; names of modules are those of transformers' model."""

    path: Path
    rank: int
    alpha: float
    by_root: bool
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    targets: tuple[str, ...] | None  # ends of names; None: a regular expression, or all
    excluded: tuple[str, ...]
    layers: tuple[int, ...]
    parameters: tuple[str, ...]  # ends of names, of all experts
    tokens: Mapping[str, tuple[int, ...]]  # by ends of names of embeddings and heads
    saved: tuple[str, ...]  # ends of names of modules that it has whole
    ties: bool  # whether changes of the embedding are those of a head that is the embedding, too
    version: str  # of the PEFT that wrote it
    base: str  # " (NAME, revision HASH)" of its base model, as far as it says

    @classmethod
    def read(cls, directory: Path) -> "PeftConfig":
        """``ValueError`` with the file, the field and the remedy for what is not allowed, or not served."""
        path = directory / CONFIG_FILE
        fields = read_json(path)
        if fields.get("peft_type") != "LORA":
            raise ValueError(f"{path}: peft_type must be 'LORA', given {shown(fields.get('peft_type'))}")
        for name, value in fields.items():
            if name in _REFUSED and _is_set(value):
                raise ValueError(f"{path}: {name} must not be set, given {shown(value)}. This is {_REFUSED[name]}")
            if name not in _READ | _NOT_NEEDED | _REFUSED.keys() and _is_set(value):
                raise ValueError(
                    f"{path}: {shown(name)} is a field that is not known here, given {shown(value)}: it may change "
                    f"what the adapter computes. {MERGE[0].upper()}{MERGE[1:]}"
                )
        if fields.get("bias", "none") != "none":
            raise ValueError(f"{path}: bias must be 'none', given {shown(fields['bias'])}: {MERGE}")
        start = fields.get("init_lora_weights", True)
        if not any(start is one or (isinstance(start, str) and start == one) for one in _STARTS):
            raise ValueError(
                f"{path}: init_lora_weights must be one of {', '.join(map(repr, _STARTS))}, given {shown(start)}, "
                "which changes the base model's weights: convert it with path_initial_model_for_weight_conversion of "
                "PEFT's save_pretrained"
            )
        by_root = fields.get("use_rslora") or False
        if not isinstance(by_root, bool):
            raise ValueError(f"{path}: use_rslora must be true or false, given {shown(by_root)}")
        targets = fields.get("target_modules")
        return cls(
            path,
            _rank(path, "r", fields.get("r", 8)),
            _alpha(path, "lora_alpha", fields.get("lora_alpha", 8)),
            by_root,
            {key: _rank(path, "rank_pattern", value) for key, value in _patterns(path, fields, "rank_pattern")},
            {key: _alpha(path, "alpha_pattern", value) for key, value in _patterns(path, fields, "alpha_pattern")},
            None
            if isinstance(targets, str) or fields.get("layers_pattern")
            else _names(path, fields, "target_modules"),
            () if isinstance(fields.get("exclude_modules"), str) else _names(path, fields, "exclude_modules"),
            _layers(path, fields.get("layers_to_transform")),
            _names(path, fields, "target_parameters"),
            _tokens(path, fields.get("trainable_token_indices")),
            _names(path, fields, "modules_to_save"),
            bool(fields.get("ensure_weight_tying")),
            str(fields.get("peft_version") or ""),
            _base(fields),
        )

    def rank_of(self, module: str) -> int:
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """By which ``B A`` is multiplied: alpha over the rank, or over its root (rsLoRA, arXiv:2312.03732)."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.by_root else rank)

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Those whose rows of ``module`` are replaced. ``ValueError`` where it does not say which."""
        found = next((ids for name, ids in self.tokens.items() if not name or _ends_with(module, (name,))), None)
        if not found:
            raise ValueError(f"{self.path}: trainable_token_indices must have tokens for {module:.200}, given none")
        return found

    def saves(self, module: str) -> bool:
        """Whether the adapter has ``module`` whole, by ``modules_to_save``."""
        return _ends_with(module, self.saved)

    def is_older_than(self, *version: int) -> bool:
        """Whether a PEFT before ``version`` wrote it, or nobody knows."""
        return tuple(map(int, re.findall(r"\d+", self.version)[:2])) < version

    def names_parameter(self, parameter: str) -> bool:
        """As ``names``, of a parameter of all experts."""
        return _ends_with(parameter, self.parameters)

    def names(self, module: str) -> bool:
        """Whether the config says by name that the adapter changes ``module``; False where it gives a pattern."""
        if self.targets is None or not _ends_with(module, self.targets) or _ends_with(module, self.excluded):
            return False
        number = re.search(r"\.(\d+)\.", module)
        return not self.layers or (number is not None and int(number[1]) in self.layers)


def _base(fields: Mapping[str, Any]) -> str:
    name, revision = (str(fields.get(one) or "")[:200] for one in ("base_model_name_or_path", "revision"))
    return f" ({name}{', revision ' * bool(revision)}{revision})" if name else ""


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ({}, [], "")


def _ends_with(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first(values: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    return next((value for pattern, value in values.items() if pattern.match(module)), default)


def _rank(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**16:
        raise ValueError(f"{path}: {name} must have integers from 1 to 65536, given {shown(value)}")
    return value


def _alpha(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_ALPHA:
        raise ValueError(f"{path}: {name} must have finite numbers below {_MOST_ALPHA:g}, given {shown(value)}")
    return float(value)


def _names(path: Path, fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{path}: {name} must be a list of names, a regular expression or null, given {shown(value)}")
    return tuple(value)


def _layers(path: Path, value: Any) -> tuple[int, ...]:
    layers = [value] if isinstance(value, int) else value or []
    if not isinstance(layers, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in layers):
        raise ValueError(
            f"{path}: layers_to_transform must be an integer, a list of these or null, given {shown(value)}"
        )
    return tuple(layers)


def _tokens(path: Path, value: Any) -> dict[str, tuple[int, ...]]:
    by_module = value if isinstance(value, dict) else {"": value} if value else {}
    for ids in by_module.values():
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
            raise ValueError(
                f"{path}: trainable_token_indices must be a list of tokens, an object of such or null, given "
                f"{shown(value)}"
            )
        if len(set(ids)) < len(ids):
            raise ValueError(f"{path}: trainable_token_indices must have each token once, given {shown(value)}")
    return {name: tuple(ids) for name, ids in by_module.items()}


def _patterns(path: Path, fields: Mapping[str, Any], name: str) -> list[tuple[re.Pattern[str], Any]]:
    """As PEFT compares the keys of ``name`` with modules: an end of the name, after a dot."""
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {name} must be an object, given {shown(value)}")
    return [(_pattern(path, name, key), one) for key, one in value.items()]


def _pattern(path: Path, name: str, key: str) -> re.Pattern[str]:
    repetitions = len(re.findall(r"(?<!\\)[*+{]", key))
    if len(key) > 500 or repetitions > _MOST_REPETITIONS or re.search(r"\)[*+{]|\(\?[^:]", key):
        raise ValueError(
            f"{path}: {name} must have names of modules, or regular expressions of at most 500 characters with at most "
            f"{_MOST_REPETITIONS} repetitions, none of a group, given {shown(key)}: write the names"
        )
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise ValueError(f"{path}: {name} must have regular expressions, given {shown(key)}: {error}") from error
