"""One field of a ``config.json`` spoilt or left out, and what transformers and this engine make of it.

Every family's small model, with every field that transformers' config class knows or acts on, those of older versions
and those of rotary embeddings included.
"""

import copy
import dataclasses
import functools
import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers.initialization import no_init_weights

from compiled_llm.checkpoint import loader
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_fields import class_parameters, rope_names
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.registry import family
from compiled_llm.models.weights import ModelWeights
from tests.families import EVERY_CONFIG, keep_time_steps, logits_of, strengthened
from tests.models.steps import step_input, step_logits

NUM_TOKENS = 21  # more than the windows of these models
# Of a model that is made. Of larger ones the sizes are compared: float32 is no measure after many layers.
MOST_WEIGHTS, MOST_LAYERS = 4_000_000, 8
LEFT_OUT = "left out"
VALUES: dict[str, Any] = {
    "null": None,
    "[]": [],
    "{}": {},
    "x": "x",
    "-1": -1,
    "0": 0,
    "1e30": 1e30,
    "NaN": math.nan,
    "true": True,
    "2**40": 2**40,
    LEFT_OUT: ...,
}
# Fields that transformers' base class, or AutoModel, acts on.
_COMMON = ("architectures", "model_type", "output_attentions", "quantization_config", "torch_dtype")


class Mutation(NamedTuple):
    """``path``: of the field, from the outermost object inwards."""

    model: str
    path: tuple[str, ...]
    value: str  # of VALUES

    def __str__(self) -> str:
        return f"{self.model}: {'.'.join(self.path)}={self.value}"


CONFIGS = {
    **EVERY_CONFIG,
    "ministral": (
        "MinistralForCausalLM",
        {**EVERY_CONFIG["mistral"][1], "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@functools.cache
def _parts(model: str) -> tuple[Any, Any, dict[str, Any]]:
    """transformers' classes of the model and its config, and ``config.json``."""
    class_name, fields = CONFIGS[model]
    model_class = getattr(transformers, class_name)
    content = {"architectures": [class_name], "model_type": model_class.config_class.model_type, "dtype": "float32"}
    return model_class, model_class.config_class, {**content, **fields}


def mutations(model: str) -> list[Mutation]:
    """All of a model."""
    _, config_class, content = _parts(model)
    names = {*class_parameters(config_class), *rope_names(config_class), *_COMMON, *content}
    names |= {*family(CONFIGS[model][0]).old_fields}
    paths: list[tuple[str, ...]] = [(name,) for name in sorted(names)]
    for name, value in content.get("rope_parameters", {}).items():
        paths += [("rope_parameters", name)]
        if isinstance(value, dict):
            paths += [("rope_parameters", name, inner) for inner in value]
    return [Mutation(model, path, value) for path in paths for value in VALUES if _changes(content, path, value)]


def _changes(content: dict[str, Any], path: tuple[str, ...], value: str) -> bool:
    for name in path[:-1]:
        content = content[name]
    return path[-1] in content if value == LEFT_OUT else True


def mutated(mutation: Mutation) -> dict[str, Any]:
    """The ``config.json``."""
    content = copy.deepcopy(_parts(mutation.model)[2])
    inner = content
    for name in mutation.path[:-1]:
        inner = inner[name]
    if mutation.value == LEFT_OUT:
        del inner[mutation.path[-1]]
    else:
        inner[mutation.path[-1]] = copy.deepcopy(VALUES[mutation.value])
    return content


class Outcome(NamedTuple):
    """What becomes of a mutation.

    Attributes:
        kind: "equal sizes" of a model that is too large to be made; "not finite" where transformers' logits are not;
            "serves alone" where transformers fails; "wrong" for anything that must not be.
        told: why.
    """

    kind: Literal["equal", "equal sizes", "not finite", "refused", "refused by both", "serves alone", "wrong"]
    told: str = ""


def outcome(mutation: Mutation, *, ask_both: bool) -> Outcome:
    """What becomes of it. ``ask_both``: transformers also where this engine refuses."""
    content = mutated(mutation)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = parse_config(copy.deepcopy(content))
    except ValueError as error:
        if type(error) is not ValueError or mutation.path[-1] not in f"{error}":
            return Outcome("wrong", f"{type(error).__name__} does not name the field: {error!s:.600}")
        if not ask_both or mutation.value == "2**40":  # transformers would make lists or masks of that length
            return Outcome("refused", f"{error}")
        return Outcome("refused" if isinstance(_theirs(mutation.model, content), Theirs) else "refused by both", "")
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error!s:.600}")
    theirs = _theirs(mutation.model, content)
    if not isinstance(theirs, Theirs):
        return Outcome("serves alone", f"{type(theirs).__name__}: {theirs!s:.300}")
    return _compared(own, theirs)


class Theirs(NamedTuple):
    """transformers' model."""

    count: int  # of its weights
    logits: Tensor | None  # [T, V]; None where there are too many weights
    directory: Path | None  # with the same weights


def _theirs(model: str, content: dict[str, Any]) -> "Theirs | Exception":
    """Or what transformers raises."""
    model_class, config_class, _ = _parts(model)
    try:
        config = config_class.from_dict(copy.deepcopy(content))
        with no_init_weights(), init_empty_weights(include_buffers=False):
            made = model_class._from_config(config, dtype=torch.float32).eval()
        made.tie_weights()
        count = sum(x.numel() for x in {id(x): x for x in made.state_dict(keep_vars=True).values()}.values())
        if count > MOST_WEIGHTS or config.num_hidden_layers > MOST_LAYERS:
            return Theirs(count, None, None)
        base = _base(model)
        if bool(config.tie_word_embeddings) == base.is_tied and _shapes(made.state_dict()) == _shapes(base.state):
            made.load_state_dict(base.state, assign=True)
            made.tie_weights()
            keep_time_steps(made)
            return Theirs(count, _logits(made), base.directory)
        torch.manual_seed(0)
        other = strengthened(model_class._from_config(config, dtype=torch.float32).eval())
        logits, directory = _logits(other), Path(tempfile.mkdtemp(prefix="compiled-llm-test-"))
        other.save_pretrained(directory)
        return Theirs(count, logits, directory)
    except Exception as error:
        return error


class _Base(NamedTuple):
    """A model as it is without a mutation."""

    is_tied: bool
    state: dict[str, Tensor]
    directory: Path


@functools.cache
def _base(model: str) -> _Base:
    model_class, config_class, content = _parts(model)
    torch.manual_seed(0)
    made = strengthened(model_class(config_class.from_dict(copy.deepcopy(content))).eval())
    directory = Path(tempfile.mkdtemp(prefix="compiled-llm-test-"))
    made.save_pretrained(directory)
    return _Base(made.config.tie_word_embeddings, made.state_dict(), directory)


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in state.items()}


def _prompt(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, min(vocab_size, 300), (1, NUM_TOKENS), generator=generator)


def _logits(model: Any) -> Tensor:
    model.config.return_dict, model.config.use_cache = True, False  # how its caller gets them
    return logits_of(model, _prompt(model.config.vocab_size))[0]


@functools.lru_cache(maxsize=4)
def _weights(directory: Path, config: ModelConfig) -> ModelWeights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loader.load_weights(directory, config, torch.float32, torch.device("cpu"))


@functools.lru_cache(maxsize=256)
def _own_logits(directory: Path, config: ModelConfig) -> Tensor:
    step = step_input([(_prompt(config.vocab_size)[0].tolist(), 0)], [list(range(1, 7))])
    step = step._replace(logits_indices=torch.arange(NUM_TOKENS, dtype=torch.int32))
    return step_logits(config, _weights(directory, config), step)


def _compared(own: ModelConfig, theirs: Theirs) -> Outcome:
    if theirs.logits is None or theirs.directory is None:
        count = sum(math.prod(shape) for shape in family(own.architecture).describe(own).taken.values())
        if count != theirs.count:
            return Outcome("wrong", f"{count} weights, where transformers' model has {theirs.count}")
        return Outcome("equal sizes")
    if not theirs.logits.isfinite().all():
        return Outcome("not finite")
    own = dataclasses.replace(own, max_position_embeddings=min(own.max_position_embeddings, NUM_TOKENS))
    try:
        found = _own_logits(theirs.directory, own)
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__} when it is run: {error!s:.600}")
    try:
        # Of logits as large as some mutations make them, float32 has fewer digits.
        within = 1e-4 + 1e-5 * theirs.logits.abs().max().item()
        torch.testing.assert_close(found, theirs.logits, atol=within, rtol=1e-4)
    except AssertionError as error:
        return Outcome("wrong", f"other logits: {' '.join(str(error).split()):.300}")
    return Outcome("equal")


def counts(outcomes: dict[Mutation, Outcome]) -> str:
    """Per model, as lines of a table."""
    kinds = ("equal", "equal sizes", "not finite", "refused", "refused by both", "serves alone", "wrong")
    lines = [f"| model | {' | '.join(kinds)} |"]
    for model in dict.fromkeys(mutation.model for mutation in outcomes):
        found = [found.kind for mutation, found in outcomes.items() if mutation.model == model]
        lines.append(f"| {model} | {' | '.join(str(found.count(kind)) for kind in kinds)} |")
    return "\n".join(lines)


def as_json(outcomes: dict[Mutation, Outcome]) -> str:
    """For a look at single ones."""
    return json.dumps({str(mutation): found for mutation, found in outcomes.items()}, indent=0)
