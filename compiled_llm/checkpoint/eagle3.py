"""The files of an EAGLE-3 head, in the layout of the paper's authors or that of the library ``speculators``."""

from collections.abc import Collection, Mapping
from typing import Any

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.draft_heads.eagle3 import Eagle3Config

# Fields of config.json besides those of a Llama -> the only values that are served.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (None, 1),
}
_OWN = (
    "architectures", "auto_map", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm",
    "norm_before_fc", "norm_before_residual", "norm_output", "target_hidden_size", "tie_word_embeddings",
)  # fmt: skip
_IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_config(config: Mapping[str, Any], names: Collection[str] | None, target: ModelConfig) -> Eagle3Config:
    """What ``config.json`` says, for drafting for the model of ``target``.

    Args:
        names: of the checkpoint's tensors; None: they are not known, and taken to be the usual ones.

    Raises:
        ValueError: it is not served, or leaves open what implementations take differently.
    """
    of_library = "speculators_model_type" in config
    body = config.get("transformer_layer_config") if of_library else config
    if not isinstance(body, Mapping):
        raise _error("transformer_layer_config must be the config of a layer", body)
    if of_library and config["speculators_model_type"] != "eagle3":
        raise _error("speculators_model_type must be 'eagle3'", config["speculators_model_type"])
    if body.get("model_type", "llama") != "llama":
        raise _error("model_type must be 'llama'", body.get("model_type"))
    if of_library and "norm_before_residual" not in config:
        raise ValueError(
            "config.json: norm_before_residual must be given: speculators takes False where it is missing, and vLLM "
            "True. Write down which it was trained with"
        )
    nested = config.get("eagle_config") or {}
    for name, allowed in _FIXED.items():
        if nested.get(name, allowed[0]) not in allowed:
            raise _error(f"eagle_config: {name} must be {allowed[0]}", nested[name])
    plain = {name: value for name, value in body.items() if name not in _OWN}
    plain |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    made = parse_config(plain)
    layer_ids = _layer_ids(config, nested, target.num_layers)
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__} | {"architecture": "eagle3"}
    found = Eagle3Config(
        **fields,
        draft_vocab_size=config.get("draft_vocab_size") or made.vocab_size,
        target_hidden_size=config.get("target_hidden_size") or target.hidden_size,
        layer_ids=layer_ids,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc") or False),
        fc_norm=bool(config.get("fc_norm") or False),
        norm_output=bool(config.get("norm_output") or False),
        first_layer="layers.0" if of_library or (names and "midlayer.hidden_norm.weight" not in names) else "midlayer",
        has_embedding=names is not None and "embed_tokens.weight" in names,
        has_head=names is None or "lm_head.weight" in names,
    )
    _check(found, target)
    return found


def _layer_ids(config: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read. Within ``eagle_config`` they are those whose outputs are, one less each."""
    usual = (2, num_layers // 2, num_layers - 3)
    given, inner = config.get(_IDS), nested.get(_IDS)
    if given and inner:
        raise _error(f"{_IDS} must be given once", [given, inner])
    ids = given or inner or usual
    is_right = isinstance(ids, list | tuple) and all(isinstance(one, int) and one >= 0 for one in ids)
    if not is_right or list(ids) != sorted(set(ids)):
        raise _error(f"{_IDS} must be numbers of layers, ascending", ids)
    if inner and tuple(ids) == usual:
        raise ValueError(
            f"config.json: eagle_config: {_IDS} must be the layers whose outputs are read, given {list(ids)}, which "
            "look like those whose inputs are. Give such beside eagle_config, not within"
        )
    return tuple(one + bool(inner) for one in ids)


def _check(config: Eagle3Config, target: ModelConfig) -> None:
    if config.target_hidden_size != target.hidden_size:
        raise _error(f"target_hidden_size must be {target.hidden_size}, the model's", config.target_hidden_size)
    if config.vocab_size != target.vocab_size:
        raise _error(f"vocab_size must be {target.vocab_size}, the model's", config.vocab_size)
    if not 0 < config.draft_vocab_size <= config.vocab_size:
        raise _error(f"draft_vocab_size must be from 1 to {config.vocab_size}", config.draft_vocab_size)
    if config.norm_before_fc and config.fc_norm:
        raise _error("norm_before_fc and fc_norm must not both be true", True)
    if not config.has_head and config.draft_vocab_size != target.vocab_size:
        raise _error("draft_vocab_size must be the model's where there is no lm_head", config.draft_vocab_size)
    lacks = not (config.has_embedding and config.has_head)
    if lacks and config.hidden_size != target.hidden_size:
        raise _error(
            f"hidden_size must be {target.hidden_size}, the model's, whose embed_tokens or lm_head serve where the "
            "checkpoint has none",
            config.hidden_size,
        )


def _error(rule: str, given: Any) -> ValueError:
    return ValueError(f"config.json of speculative_config's model: {rule}, given {given!r:.100}")
