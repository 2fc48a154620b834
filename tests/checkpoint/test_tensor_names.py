"""A family's tensors are found under other names, and tensors of other parts are told from those that matter."""

import pytest

from compiled_llm.checkpoint.tensor_names import by_family_names, parts_of

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
# As checkpoints of models around a language model, and of its body alone, have them.
WAYS = {
    "its own": lambda name: name,
    "whole in another": lambda name: f"language_model.{name}",
    "body in another's": lambda name: name.replace("model.", "model.language_model."),
    "body as text model": lambda name: name.replace("model.", "model.text_model."),
    "body alone": lambda name: name.removeprefix("model."),
    "body alone in another": lambda name: name.replace("model.", "language_model."),
}


@pytest.mark.parametrize("way", WAYS)
def test_names_of_other_models(way: str) -> None:
    stored = {WAYS[way](name): number for number, name in enumerate(NAMES)} | {"visual.layers.0.weight": 9}
    found = by_family_names(stored, NAMES)
    assert found == {**{name: number for number, name in enumerate(NAMES)}, "visual.layers.0.weight": 9}


def test_a_head_may_stay_under_its_own_name() -> None:
    stored = {f"language_model.{name}": name for name in NAMES[:-1]} | {"lm_head.weight": "lm_head.weight"}
    assert by_family_names(stored, NAMES) == {name: name for name in NAMES}


def test_other_roots() -> None:
    names = ["transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight"]
    stored = {name.removeprefix("transformer."): name for name in names}
    assert by_family_names(stored, names) == {name: name for name in names}


def test_a_body_as_transformers_names_it() -> None:
    names = ["backbone.embeddings.weight", "backbone.layers.0.norm.weight", "lm_head.weight"]
    stored = {name.replace("backbone.", "model."): name for name in names}
    assert by_family_names(stored, names) == {name: name for name in names}


def test_nothing_is_renamed_where_nothing_fits() -> None:
    assert by_family_names({"a": 1, "b.0.c": 2}, NAMES) == {"a": 1, "b.0.c": 2}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vision_tower.layers.0.mlp.weight", "vision_tower"),
        ("model.visual.blocks.0.attn.weight", "visual"),
        ("model.multi_modal_projector.linear_1.weight", "multi_modal_projector"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp"),
        ("model.mtp_layers.0.enorm.weight", "mtp_layers"),
        ("model.layers.2.mlp.up_proj.weight", "model.layers.2"),
        ("model.layers.2.eh_proj.weight", "model.layers.2"),
        ("model.layers.3.mlp.up_proj.weight", None),  # one layer too many, and nothing says what for
        ("model.layers.1.self_attn.q_norm.weight", None),  # a layer that is run
        ("model.layers.1.mlp.visual.weight", None),
        ("model.embed_positions.weight", None),
        (f"model.layers.{'9' * 5000}.eh_proj.weight", None),
    ],
)
def test_parts_that_may_be_left(name: str, part: str | None) -> None:
    extra = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight", name]
    assert parts_of(extra, 2)[name] == part
