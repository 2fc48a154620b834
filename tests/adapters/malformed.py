"""Spoilt adapters: a name, what spoils a good one of qwen3-moe's layers, and what the message says."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model.model."
_Q, _EXPERTS = f"{_BASE}model.layers.0.self_attn.q_proj", f"{_BASE}model.layers.0.mlp.experts"
_EMBEDDING, _HEAD = f"{_BASE}model.embed_tokens", f"{_BASE}lm_head"
Spoil = Callable[[Path], Any]


def fields(**changes: Any) -> Spoil:
    return lambda path: (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def text(content: str | bytes) -> Spoil:
    return lambda path: (path / CONFIG).write_bytes(content if isinstance(content, bytes) else content.encode())


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    def spoil(path: Path) -> None:
        held = load_file(path / TENSORS)
        change(held)
        save_file(held, path / TENSORS)

    return spoil


def put(**changes: Tensor) -> Spoil:
    return tensors(lambda held: held.update(changes))


def drop(name: str) -> Spoil:
    return tensors(lambda held: held.pop(name))


def header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Of the tensors' file, whose data stay."""

    def spoil(path: Path) -> None:
        content = (path / TENSORS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        parsed = json.loads(content[8 : 8 + size])
        change(parsed)
        new = json.dumps(parsed).encode()
        (path / TENSORS).write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])

    return spoil


def cut(count: int) -> Spoil:
    return lambda path: os.truncate(path / TENSORS, count if count > 0 else (path / TENSORS).stat().st_size + count)


def replaced(name: str, make: Callable[[Path], Any]) -> Spoil:
    def spoil(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return spoil


def both(*spoils: Spoil) -> Spoil:
    return lambda path: [spoil(path) for spoil in spoils]


def index(path: Path) -> None:
    """Shards elsewhere, which PEFT never writes."""
    (path / TENSORS).rename(path.parent / "shard.safetensors")
    content = {"weight_map": {f"{_Q}.lora_A.weight": "../shard.safetensors"}}
    (path / f"{TENSORS}.index.json").write_text(json.dumps(content))


def _of_tokens(ids: Any, rows: int, width: int = 112) -> Spoil:
    def change(held: dict[str, Tensor]) -> None:
        held.clear()
        held[f"{_EMBEDDING}.token_adapter.trainable_tokens_delta"] = torch.ones(rows, width)

    return both(tensors(change), fields(target_modules=[], target_parameters=[], trainable_token_indices=ids))


MALFORMED: dict[str, tuple[Spoil, str]] = {
    "cut in its header": (cut(40), "not a safetensors file"),
    "cut in its data": (cut(-7), "where its header says"),
    "empty": (replaced(TENSORS, lambda file: file.touch()), "not a safetensors file"),
    "header longer than the file": (
        replaced(TENSORS, lambda file: file.write_bytes(struct.pack("<Q", 2**40) + b"{}")), "not a safetensors file",
    ),
    "overlapping tensors": (
        header(lambda held: [one.update(data_offsets=[0, 64]) for n, one in held.items() if n != "__metadata__"]),
        "not a safetensors file|header",
    ),
    "a negative size": (header(lambda held: held[f"{_Q}.lora_A.weight"].update(shape=[-4, -112])), "safetensors"),
    "an unknown dtype": (header(lambda held: held[f"{_Q}.lora_A.weight"].update(dtype="F7")), "safetensors"),
    "a pickle": (replaced(TENSORS, lambda file: torch.save({}, file.with_suffix(".bin"))), "can hold code"),
    "a pickle by another name": (replaced(TENSORS, lambda file: torch.save({}, file)), "not a safetensors file"),
    "a directory for tensors": (replaced(TENSORS, lambda file: file.mkdir()), "must be a regular file"),
    "a FIFO": (replaced(TENSORS, os.mkfifo), "must be a regular file"),
    "a FIFO for a config": (replaced(CONFIG, os.mkfifo), "must be a regular file"),
    "a link to itself": (replaced(TENSORS, lambda file: file.symlink_to(file.name)), "must be a directory with"),
    "a link into nowhere": (replaced(CONFIG, lambda file: file.symlink_to("/nowhere/x.json")), "must be a directory"),
    "a link to a device": (replaced(TENSORS, lambda file: file.symlink_to("/dev/zero")), "must be a regular file"),
    "a link to another file": (replaced(TENSORS, lambda file: file.symlink_to("/etc/passwd")), "not a safetensors"),
    "an index": (index, "must be a directory with"),
    "no config": (replaced(CONFIG, lambda file: None), "must be a directory with"),
    "JSON that ends": (text('{"r": 8, '), "not readable as JSON"),
    "JSON that nests": (text("[" * 100_000), "not readable as JSON"),
    "JSON of a list": (text("[]"), "must hold a JSON object"),
    "no UTF-8": (text(b'{"r": "\xff"}'), "not readable as JSON"),
    "a number of 5,000 digits": (text('{"peft_type": "LORA", "r": ' + "9" * 5000 + "}"), "not readable as JSON"),
    "a huge config": (text('{"x": "' + "y" * (1 << 23) + '"}'), "must have at most"),
    "another method": (fields(peft_type="IA3"), "peft_type must be 'LORA'"),
    "a huge rank": (fields(r=10**6), "r must have integers from 1 to 65536"),
    "a rank beyond the engine's": (
        both(
            fields(r=9, target_modules=[]),
            tensors(lambda held: [held.pop(name) for name in list(held) if "layers.0.self_attn.q_proj" not in name]),
            put(**{f"{_Q}.lora_A.weight": torch.ones(9, 112), f"{_Q}.lora_B.weight": torch.ones(128, 9)}),
        ),
        "at most the engine's max_lora_rank",
    ),
    "a rank of another number": (fields(r=5), r"must be \[5, "),
    "a rank that is a fraction": (fields(r=4.5), "r must have integers"),
    "alpha without end": (text('{"peft_type": "LORA", "lora_alpha": Infinity}'), "lora_alpha must have finite numbers"),
    "an absurd alpha": (fields(lora_alpha=1e39), "lora_alpha must have finite numbers"),
    "alpha in words": (fields(lora_alpha="16"), "lora_alpha must have finite numbers"),
    "an expression that takes for ever": (fields(rank_pattern={"(.*a){30}": 4}), "none of a group"),
    "no A": (drop(f"{_Q}.lora_A.weight"), "lacks tensors"),
    "no B": (drop(f"{_EMBEDDING}.lora_embedding_B"), "lacks tensors"),
    "no tensor": (tensors(dict.clear), "holds no tensor"),
    "NaN": (put(**{f"{_Q}.lora_B.weight": torch.full((128, 4), torch.nan)}), "must have finite numbers"),
    "infinity": (put(**{f"{_HEAD}.lora_A.weight": torch.full((4, 112), torch.inf)}), "must have finite numbers"),
    "whole numbers": (put(**{f"{_Q}.lora_A.weight": torch.ones(4, 112).int()}), "must be in F32, F16, BF16"),
    "another model's size": (put(**{f"{_Q}.lora_A.weight": torch.ones(4, 113)}), "load the adapter's own base model"),
    "another model's layers": (
        put(**{f"{_BASE}model.layers.77.mlp.up_proj.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}),
        "lets no adapter change: model.layers.77.mlp.up_proj",
    ),
    "another model's names": (
        put(**{f"{_BASE}transformer.h.0.attn.c_attn.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}),
        "lets no adapter change",
    ),
    "one layer twice": (
        put(**{f"{_BASE}layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 112),
               f"{_BASE}layers.0.self_attn.q_proj.lora_B.weight": torch.ones(128, 4)}),
        "twice",
    ),
    "an expert too many": (
        put(**{f"{_BASE}model.layers.0.mlp.experts.99.up_proj.lora_A.weight": torch.ones(4, 112),
               f"{_BASE}model.layers.0.mlp.experts.99.up_proj.lora_B.weight": torch.ones(40, 4)}),
        "names modules without|must be one of",
    ),
    "experts the other way round": (
        put(**{f"{_EXPERTS}.lora_A.weight": torch.ones(28, 112), f"{_EXPERTS}.lora_B.weight": torch.ones(40, 28)}),
        "must be of a parameter of this model",
    ),
    "too few experts": (
        tensors(lambda held: held.update({f"{_EXPERTS}.lora_A.weight": held[f"{_EXPERTS}.lora_A.weight"][:4]})),
        "by the base model and the rank",
    ),
    "a head's base of another model": (put(**{f"{_HEAD}.base_layer.weight": torch.ones(307, 112)}), "must be the base"),
    "a larger vocabulary": (put(**{f"{_EMBEDDING}.base_layer.weight": torch.ones(310, 112)}), "must be the base"),
    "a whole module": (put(**{f"{_BASE}model.norm.weight": torch.ones(112)}), "a whole module's"),
    "a head whole and changed": (put(**{f"{_HEAD}.weight": torch.ones(307, 112)}), "a whole module's"),
    "whole modules that are none": (fields(modules_to_save="lm_head"), "modules_to_save must be a list"),
    "tokens beyond the vocabulary": (_of_tokens([5, 400], 2), "must be below 307"),
    "more tokens than rows": (_of_tokens([5, 6, 7], 2), r"must be \[3, 112\]"),
    "a token twice": (_of_tokens([5, 5], 2), "each token once"),
    "tokens of no module": (_of_tokens({"lm_head": [5]}, 1), "names modules without tensors"),
    "tokens that are none": (_of_tokens([-1], 1), "must be a list of tokens"),
}  # fmt: skip
