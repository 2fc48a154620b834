"""Hostile model directories, whose tensors have other names than a family's, or which are models around another.

Each case is a name and what spoils a good directory. Those in ``SERVED`` are no corruptions: they serve.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

UP = "model.layers.1.mlp.up_proj.weight"
SERVED = {
    f"names: {name}"
    for name in (
        "within another model",
        "body in another's",
        "body alone",
        "parts of other kinds",
        "20,000 tensors of another part",
        "layers that guess",
        "buffers of old",
        "a copy in other names",
    )
}


def cases() -> dict[str, Callable[[Path], None]]:
    """Name -> what spoils a good directory."""
    vision = {
        "vision_tower.a": torch.zeros(3, dtype=torch.int8),
        "model.visual.blocks.0.b": torch.zeros(0),
        "multi_modal_projector.c": torch.full((2, 2), float("nan")),
        "mtp.layers.0.d": torch.zeros((), dtype=torch.bool),
    }
    guessing = {"model.layers.2.eh_proj.weight": torch.zeros(1), "model.layers.2.mlp.up_proj.weight": torch.zeros(2)}
    edits: dict[str, Callable[[Tensors], Any]] = {
        "within another model": lambda t: _rename(t, lambda name: f"language_model.{name}"),
        "body in another's": lambda t: _rename(t, lambda name: name.replace("model.", "model.language_model.", 1)),
        "body alone": lambda t: _rename(t, lambda name: name.removeprefix("model.")),
        "half within another": lambda t: _rename(t, lambda n: f"language_model.{n}" if "layers.0" in n else n),
        "twice": lambda t: t.update({f"language_model.{name}": tensor.clone() for name, tensor in t.items()}),
        "within a model unheard of": lambda t: _rename(t, lambda name: f"evil.{name}"),
        "without layers": lambda t: _rename(t, lambda name: name.replace("layers.", "blocks.")),
        "layers from 1 on": lambda t: _rename(t, lambda name: name.replace("layers.1", "layers.2")),
        "layers of leading zeros": lambda t: _rename(t, lambda name: name.replace("layers.1", "layers.01")),
        "layer 10^30": lambda t: t.update({f"model.layers.{10**30}.mlp.up_proj.weight": torch.zeros(1)}),
        "layers of other digits": lambda t: _rename(t, lambda name: name.replace("layers.1", "layers.\u0661")),
        "parts of other kinds": lambda t: t.update(vision),
        "20,000 tensors of another part": lambda t: t.update({f"visual.{i}": torch.zeros(0) for i in range(20_000)}),
        "layers that guess": lambda t: t.update(guessing),
        "a layer too many": lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}),
        "20,000 layers too many": lambda t: t.update({f"model.layers.{i}.x": torch.zeros(0) for i in range(9, 20_009)}),
        "a layer of 5,000 digits": lambda t: t.update({f"model.layers.{'9' * 5000}.eh_proj": torch.zeros(1)}),
        "buffers of old": lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}),
        "scales of a quantised layer": lambda t: t.update({f"{UP}_scale_inv": torch.ones(1)}),
        "a norm that Llama has not": lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
        "an adapter": lambda t: t.update({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 32)}),
        "empty": lambda t: t.update({"": torch.zeros(1)}),
        "paths": lambda t: t.update({"../../../etc/passwd": torch.zeros(1)}),
        "NUL and newlines": lambda t: t.update({"a\0b\n\x1b[2J": torch.zeros(1)}),
        "100,000 characters": lambda t: t.update({"model." + "x." * 50_000: torch.zeros(1)}),
        "50,000 dots": lambda t: t.update({"." * 50_000: torch.zeros(1)}),
    }
    found: dict[str, Callable[[Path], None]] = {
        f"names: {name}": functools.partial(_edit, edit) for name, edit in edits.items()
    }
    found["names: a copy in other names"] = _copy
    text = {"model_type": "mistral", "hidden_size": 32}
    texts: dict[str, Any] = {
        "missing": {},
        "null": {"text_config": None},
        "a list": {"text_config": [1]},
        "empty": {"text_config": {}},
        "of no kind": {"text_config": {"model_type": "evil"}},
        "of a kind that is a list": {"text_config": {"model_type": []}},
        "of a kind that is an object": {"text_config": {"model_type": {}}},
        "a wrapper again": {"text_config": {"model_type": "mistral3", "text_config": text}},
        "of other sizes": {"text_config": {**text, "vocab_size": 10**9}},
        "900 deep": {"text_config": functools.reduce(lambda inner, _: {"text_config": inner}, range(900), text)},
        "tied to both": {"text_config": {**text, "tie_word_embeddings": True}, "tie_word_embeddings": False},
        "tied to a list": {"text_config": {**text, "tie_word_embeddings": []}},
        "quantised outside": {"text_config": text, "quantization_config": {"bits": 4}},
    }
    for name, change in texts.items():
        wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", **change}
        found[f"text_config: {name}"] = functools.partial(_wrap, wrapper)
    return found


def must_name(case: str) -> tuple[str, ...]:
    """What the error of a case has to name besides a file: the tensor, where one is spoilt."""
    kind, _, what = case.partition(": ")
    if kind == "tensors":
        if what.startswith("without "):
            return (what.removeprefix("without "),)
        if what in ("transposed", "flat") or what.startswith("up_proj of"):
            return (UP, "model.safetensors")
        value, _, name = what.partition(" in ")
        return (name, "model.safetensors") if value in ("nan", "inf", "-inf") else ()
    tensors = {
        "names: a norm that Llama has not": "model.layers.0.self_attn.q_norm.weight",
        "names: scales of a quantised layer": f"{UP}_scale_inv",
        "names: an adapter": "lora_A",
        "names: a layer too many": "model.layers.2.mlp.up_proj.weight",
        "names: layers from 1 on": "model.layers.1.",
    }
    return (tensors[case], "model.safetensors") if case in tensors else ()


def _rename(tensors: Tensors, new: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[new(name)] = tensors.pop(name)


def _edit(edit: Callable[[Tensors], Any], directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def _copy(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({f"evil.{name}": tensor for name, tensor in tensors.items()}, directory / "consolidated.safetensors")


def _wrap(content: dict[str, Any], directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(content))
