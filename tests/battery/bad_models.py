"""Hostile model directories: a tiny good one, and what is done to copies of it. Each case is a name and a function."""

import functools
import json
import os
import pickle
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.llama import FAMILY
from tests import mxfp4
from tests.battery import bad_experts, bad_names, bad_quantized

Spoil = Callable[[Path], None]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": None, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


KINDS = ("whole", "sharded", "quantised", *bad_experts.CONFIGS)
"""Of good directories: a Llama in a file or two or in int8, and models with experts, that in MXFP4 in two files."""


def kind_of(case: str) -> str:
    """Which good directory a case spoils."""
    beginnings = {"index": "sharded", "quantised": "quantised"} | {kind: kind for kind in bad_experts.CONFIGS}
    return next((kind for beginning, kind in beginnings.items() if case.startswith(beginning)), "whole")


def make_good(directory: Path, kind: str) -> None:
    """Two layers with random weights and a tokenizer of bytes, which serve."""
    directory.mkdir()
    config = bad_experts.CONFIGS.get(kind, CONFIG)
    more = {"quantization_config": bad_quantized.QUANTIZATION} if kind == "quantised" else {}
    write_json(directory / "config.json", {**config, **more})
    write_json(directory / "generation_config.json", {"eos_token_id": 2, "temperature": 0.6})
    tensors = mxfp4.tensors_of(config)
    if kind != "mxfp4":
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    if kind == "quantised":
        tensors = bad_quantized.quantised(tensors)
    if kind in ("sharded", "mxfp4"):
        placed = {name: SHARDS[i % 2] for i, name in enumerate(sorted(tensors))}
        for shard in SHARDS:
            save_file({name: tensors[name] for name in placed if placed[name] == shard}, directory / shard)
        write_json(directory / INDEX, {"metadata": {"total_size": 1}, "weight_map": placed})
    else:
        save_file(tensors, directory / "model.safetensors")
    words = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(ord("A"), ord("A") + 58)), "ab", "abc", "bc"]
    merges = [("a", "b"), ("ab", "c"), ("b", "c")]
    bpe = models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    )
    write_json(directory / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    """``edit`` changes what is parsed in place, or returns something else for it."""
    content = json.loads(path.read_text())
    changed = edit(content)
    write_json(path, content if changed is None else changed)


def cases() -> dict[str, Spoil]:
    """Name -> what spoils a good directory. Those whose names begin with ``index`` need one with shards."""
    found: dict[str, Spoil] = {}
    for part in (_config_values, _config_files, _kinds_of_file, _tensors, _headers, _indices, _tokenizers, _generation):
        for name, spoil in part().items():
            assert name not in found, name
            found[name] = spoil
    return found | bad_names.cases() | bad_experts.cases() | bad_quantized.cases()


def flips(count: int) -> dict[str, Spoil]:
    """Seeded flips of one bit each, in turn of a safetensors header, its tensors, an index, a config, a tokenizer.

    Every other one is of a Llama, and of the others half are of a model with experts and half of one in MXFP4.
    """
    rng = random.Random(15)
    files = (f"header of {SHARDS[0]}", f"tensors of {SHARDS[1]}", INDEX, "config.json", "tokenizer.json")
    found: dict[str, Spoil] = {}
    for i in range(count):
        kind, place = ("index", "experts", "index", "mxfp4")[i // 5 % 4], files[i % 5]
        if kind == "experts":  # in one file
            place = place.replace(SHARDS[0], "model.safetensors").replace(SHARDS[1], "model.safetensors")
            place = "tensors of model.safetensors" if place == INDEX else place
        found[f"{kind} flip {i} of {place}"] = functools.partial(_flip, place, rng.random(), rng.randrange(8))
    return found


def _flip(place: str, where: float, bit: int, directory: Path) -> None:
    part, _, name = place.rpartition(" of ")
    path = directory / name
    content = bytearray(path.read_bytes())
    begin, end = 0, len(content)
    if part:
        header = 8 + int.from_bytes(content[:8], "little")
        begin, end = (0, header) if part == "header" else (header, end)
    content[begin + int(where * (end - begin))] ^= 1 << bit
    path.write_bytes(content)


class _Bomb:
    """What a pickle of it does when it is loaded."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._sign),)


def plant_code(directory: Path, sign: Path) -> None:
    """Code of all kinds that a model directory may have. If any of it runs, ``sign`` is there."""
    code = f"import os\nos.makedirs({str(sign)!r}, exist_ok=True)\nclass Evil: pass\n"
    for name in ("evil.py", "modeling_llama.py", "configuration_llama.py", "tokenization_llama.py", "__init__.py"):
        (directory / name).write_text(code)
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (directory / name).write_bytes(pickle.dumps(_Bomb(sign)))


# -- config.json


def _config_values() -> dict[str, Spoil]:
    values: dict[str, Any] = {
        "null": None,
        "true": True,
        "minus one": -1,
        "zero": 0,
        "seven": 7,
        "10^7": 10**7,
        "10^9": 10**9,
        "2^63": 2**63,
        "10^300": 10**300,
        "a half": 0.5,
        "NaN": float("nan"),
        "infinity": float("inf"),
        "a word": "many",
        "a long word": "x" * 100_000,
        "a list": [1, 2],
        "an object": {"a": 1},
    }
    found = {
        f"config {field} is {name}": functools.partial(_set_config, {field: value})
        for field in CONFIG
        for name, value in values.items()
    }
    changes: dict[str, dict[str, Any]] = {
        "unknown architecture": {"architectures": ["BloomForCausalLM"]},
        "two architectures": {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]},
        "another family": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        "code of its own": {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
        "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}},
        "a window": {"sliding_window": 8},
        "kinds of layers": {"layer_types": ["sliding_attention"] * 2},
        "a million kinds of layers": {"layer_types": ["full_attention"] * 40_000},
        "labels without end": {"num_labels": 10**9},
        "other weights": {"transformers_weights": "/etc/passwd"},
        "rope of no kind": {"rope_scaling": {"rope_type": "evil"}},
        "rope of a kind that is a list": {"rope_scaling": {"rope_type": []}},
        "rope for each layer": {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope theta next to nothing": {"rope_theta": 1e-300},
        "rope theta of 400 digits": {"rope_theta": 10**400},
        "llama3 rope": {"rope_scaling": LLAMA3_ROPE},
        "head dim odd": {"head_dim": 15},
        "heads that do not divide": {"num_attention_heads": 3},
        "10^6 positions": {"max_position_embeddings": 10**6},
        "an unknown field": {"is_llama_config": True},
        "10,000 unknown fields": {f"unknown_{i}": i for i in range(10_000)},
    }
    for field in LLAMA3_ROPE:
        for name in ("null", "minus one", "10^300", "NaN", "a word", "an object"):
            changes[f"llama3 {field} is {name}"] = {"rope_scaling": {**LLAMA3_ROPE, field: values[name]}}
    return found | {f"config: {name}": functools.partial(_set_config, change) for name, change in changes.items()}


def _set_config(change: dict[str, Any], directory: Path) -> None:
    edit_json(directory / "config.json", lambda content: content.update(change))


# -- Files as such

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
ALL_FILES = (*JSON_FILES, "special_tokens_map.json", "chat_template.jinja", "model.safetensors")


def _config_files() -> dict[str, Spoil]:
    contents: dict[str, bytes] = {
        "empty": b"",
        "one brace": b"{",
        "a list": b"[]",
        "a number of 10,000 digits": b'{"a": ' + b"1" * 10_000 + b"}",
        "NUL": b"\0" * 100,
        "no UTF-8": b'{"a": "\xff\xfe"}',
        "UTF-16": json.dumps(CONFIG).encode("utf-16"),
        "100,000 lists in each other": b"[" * 100_000,
        "100,000 objects in each other": b'{"a":' * 100_000,
        "17 MB of lists": b"[" + b"[]," * (17 << 20 >> 1) + b"[]]",
        "a lone surrogate": b'{"architectures": ["\\ud800"], "tokenizer_class": "\\ud800"}',
    }
    return {
        f"{file} is {name}": functools.partial(_write, file, content)
        for file in JSON_FILES
        for name, content in contents.items()
    }


def _write(name: str, content: bytes, directory: Path) -> None:
    (directory / name).write_bytes(content)


def _kinds_of_file() -> dict[str, Spoil]:
    kinds: dict[str, Callable[[Path], Any]] = {
        "missing": lambda path: None,
        "a FIFO": os.mkfifo,
        "a directory": os.mkdir,
        "a socket": _bind,
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "/dev/stdin": lambda path: path.symlink_to("/dev/stdin"),
        "/proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
        "a link to nothing": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a terabyte of nothing": lambda path: path.touch() or os.truncate(path, 1 << 40),
    }
    return {
        f"{'index ' if file in (INDEX, SHARDS[0]) else ''}{file} is {kind}": functools.partial(_replace, file, make)
        for file in (*ALL_FILES, INDEX, SHARDS[0])
        for kind, make in kinds.items()
    }


def _replace(name: str, make: Callable[[Path], Any], directory: Path) -> None:
    path = directory / name
    path.unlink()
    make(path)


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:  # relative, since the names of sockets are short
        before = os.getcwd()
        os.chdir(path.parent)
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)


# -- model.safetensors


def _tensors() -> dict[str, Spoil]:
    norm, up, embedding = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    edits: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
        "none": lambda t: t.clear(),
        "a stranger": lambda t: t.update(stranger=torch.zeros(3)),
        "inv_freq of old": lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}),
        "a third layer": lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[up].clone()}),
        "transposed": lambda t: t.update({up: t[up].T.contiguous()}),
        "flat": lambda t: t.update({up: t[up].flatten()}),
        "no dimension": lambda t: t.update({norm: torch.tensor(1.0)}),
        "no element": lambda t: t.update({norm: torch.zeros(0)}),
        "a larger vocabulary": lambda t: t.update({embedding: torch.zeros(128, 32)}),
        "a second head": lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:1].clone()}),
    }
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn):
        edits[f"up_proj of {dtype}"] = lambda t, dtype=dtype: t.update({up: t[up].to(dtype)})
    for dtype in (torch.float16, torch.bfloat16):
        edits[f"all of {dtype}"] = lambda t, dtype=dtype: t.update({k: v.to(dtype) for k, v in t.items()})
    for name in FAMILY.describe(parse_config(CONFIG)).taken:
        edits[f"without {name}"] = lambda t, name=name: t.pop(name)
    for value in (float("nan"), float("inf"), -float("inf"), 3e38):
        for name in (norm, up, embedding, "lm_head.weight"):
            edits[f"{value} in {name}"] = lambda t, name=name, value=value: t[name].view(-1)[5:7].fill_(value)
    found = {f"tensors: {name}": functools.partial(_edit_tensors, edit) for name, edit in edits.items()}
    found["tensors: two files"] = lambda d: shutil.copy(d / "model.safetensors", d / "other.safetensors") and None
    found["tensors: too large for the dtype"] = _too_large
    found["tensors: tied, and the head another"] = functools.partial(_set_config, {"tie_word_embeddings": True})
    return found


def _edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any], directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def _too_large(directory: Path) -> None:
    _edit_tensors(lambda t: t["lm_head.weight"].fill_(1e30), directory)
    _set_config({"dtype": "float16"}, directory)


def _headers() -> dict[str, Spoil]:
    def entry(**fields: Any) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}

    headers: dict[str, bytes] = {
        "not JSON": b"{" * 100,
        "a list": b"[]",
        "a number": b"1",
        "nothing": b"",
        "100,000 lists in each other": b"[" * 100_000,
        "no UTF-8": b"\xff" * 100,
        "only metadata": b'{"__metadata__": {"a": "b"}}',
        "metadata of another kind": b'{"__metadata__": [1]}',
        "15 MB of entries": json.dumps({f"t{i}": entry() for i in range(200_000)}).encode(),
        "17 MB of space": b" " * (17 << 20),
        "15 MB of lists": b"[" + b"[]," * (5 << 20) + b"[]]",
    }
    entries: dict[str, Any] = {
        "no entry": {"a": None},
        "an empty entry": {"a": {}},
        "no offsets": {"a": {"dtype": "F32", "shape": [1]}},
        "one offset": {"a": entry(data_offsets=[4])},
        "negative offsets": {"a": entry(data_offsets=[-4, 4])},
        "offsets turned round": {"a": entry(data_offsets=[4, 0])},
        "offsets that are words": {"a": entry(data_offsets=["0", "4"])},
        "offsets of 2^63": {"a": entry(data_offsets=[0, 2**63])},
        "offsets of 10^300": {"a": entry(data_offsets=[0, 10**300])},
        "a shape of 2^62": {"a": entry(shape=[2**62])},
        "a shape that overflows": {"a": entry(shape=[2**32, 2**32])},
        "a negative shape": {"a": entry(shape=[-1])},
        "a shape that is a word": {"a": entry(shape="1")},
        "a shape of 100,000 dimensions": {"a": entry(shape=[1] * 100_000)},
        "an unknown dtype": {"a": entry(dtype="F3")},
        "a dtype that is a list": {"a": entry(dtype=[])},
        "overlapping tensors": {"a": entry(), "b": entry()},
        "a hole": {"a": entry(), "b": entry(data_offsets=[8, 12])},
        "a name of 1 MB": {"a" * (1 << 20): entry()},
    }
    headers |= {name: json.dumps(content).encode() for name, content in entries.items()}
    found = {f"header: {name}": functools.partial(_set_header, header) for name, header in headers.items()}
    for size in (0, 1, 2**31, 2**62, 2**64 - 1, 100_000_000):
        found[f"header: said to have {size} bytes"] = functools.partial(_set_header_size, size)
    found["header: 90 MB"] = _long_header
    for share in (0.0, 0.0001, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999):
        found[f"header: cut off at {share}"] = functools.partial(_cut, share)
    found["header: one byte more"] = lambda d: _append(d / "model.safetensors", b"x")
    return found


def _set_header(header: bytes, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def _set_header_size(size: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])


def _long_header(directory: Path) -> None:
    """The right one, with 90 MB of space behind it."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * 90_000_000
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[end:])


def _cut(share: float, directory: Path) -> None:
    path = directory / "model.safetensors"
    os.truncate(path, int(share * path.stat().st_size))


def _append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


# -- The index


def _indices() -> dict[str, Spoil]:
    norm = "model.norm.weight"
    shards: dict[str, Any] = {
        "above": "../evil.safetensors",
        "absolute": "/etc/evil.safetensors",
        "in a folder": "sub/evil.safetensors",
        "of another kind": "pytorch_model.bin",
        "missing": "missing.safetensors",
        "a number": 3,
        "null": None,
        "with a NUL": "evil\0.safetensors",
        "a lone surrogate": "\ud800.safetensors",
        "of 300 letters": "x" * 300 + ".safetensors",
        "only an ending": ".safetensors",
        "the other one": SHARDS[0],
    }
    found = {f"index shard {name}": functools.partial(_set_weight_map, {norm: shard}) for name, shard in shards.items()}
    contents: dict[str, Any] = {
        "without a map": {},
        "of a list": {"weight_map": []},
        "of null": {"weight_map": None},
        "empty": {"weight_map": {}},
        "of strangers": {"weight_map": {"stranger": SHARDS[0]}},
        "of 150,000 names": {"weight_map": {f"t{i}": SHARDS[0] for i in range(150_000)}},
        "of 50,000 files": {"weight_map": {f"t{i}": f"s{i}.safetensors" for i in range(50_000)}},
    }
    for name, content in contents.items():
        found[f"index {name}"] = lambda d, content=content: write_json(d / INDEX, content)
    raw = {"empty file": b"", "not JSON": b"{", "deep": b'{"a":' * 100_000, "20 MB": b" " * (20 << 20)}
    for name, data in raw.items():
        found[f"index is {name}"] = functools.partial(_write, INDEX, data)
    found["index: a stranger in a shard"] = lambda d: edit_json(d / INDEX, lambda c: c["weight_map"].pop(norm) and None)
    found["index: one shard cut off"] = lambda d: os.truncate(d / SHARDS[1], 500)
    return found


def _set_weight_map(change: dict[str, Any], directory: Path) -> None:
    edit_json(directory / INDEX, lambda content: content["weight_map"].update(change))


# -- The tokenizer


def _tokenizers() -> dict[str, Spoil]:
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    replaced: dict[str, dict[str, Any]] = {
        "model null": {"model": None},
        "model of no kind": {"model": {"type": "Evil"}},
        "model empty": {"model": {}},
        "WordPiece without its unknown": {"model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0},
                                                    "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
        "WordLevel without its unknown": {"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}},
        "Unigram": {"model": unigram},
        "Unigram with unk_id 99": {"model": {**unigram, "unk_id": 99}},
        "Unigram without unk_id": {"model": {**unigram, "unk_id": None}},
        "Unigram without words": {"model": {**unigram, "vocab": []}},
        "Unigram of NaN": {"model": {**unigram, "vocab": [["<unk>", 0.0], ["a", float("nan")]]}},
        "Unigram of an empty word": {"model": {**unigram, "vocab": [["<unk>", 0.0], ["", -1.0]]}},
        "Unigram falling back to bytes": {"model": {**unigram, "byte_fallback": True}},
        "cut with a stride too long": {"truncation": {**truncation, "stride": 99}},
        "cut to nothing": {"truncation": {**truncation, "max_length": 0}},
        "padded to 10^18": {"padding": {"strategy": {"Fixed": 10**18}, "direction": "Right", "pad_to_multiple_of": None,
                                        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}},
        "padded to multiples of 0": {"padding": {"strategy": "BatchLongest", "direction": "Right",
                                                 "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
                                                 "pad_token": "<s>"}},
        "normalizer of a bad pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}},
        "normalizer of a slow pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*b"},
                                                        "content": "x"}},
        "normalizer with a bad charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "normalizer with a long charsmap": {"normalizer": {"type": "Precompiled",
                                                           "precompiled_charsmap": "/////////////w=="}},
        "normalizer with an empty pattern": {"normalizer": {"type": "Replace", "pattern": {"String": ""},
                                                            "content": "x"}},
        "splitter of a bad pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "["},
                                                        "behavior": "Isolated", "invert": False}},
        "splitter of an empty pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"String": ""},
                                                           "behavior": "Isolated", "invert": False}},
        "metaspace of two letters": {"pre_tokenizer": {"type": "Metaspace", "replacement": "xy",
                                                       "prepend_scheme": "always", "split": True}},
        "template of a missing token": {"post_processor": {"type": "TemplateProcessing",
                                        "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [],
                                        "special_tokens": {}}},
        "template of an id beyond": {"post_processor": {"type": "TemplateProcessing",
                                     "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                                     "special_tokens": {"<s>": {"id": "<s>", "ids": [10**6], "tokens": ["<s>"]}}}},
        "decoder of no kind": {"decoder": {"type": "Evil"}},
        "decoder that strips 10^9": {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
        "no version": {"version": None},
        "another version": {"version": "9.9"},
        "added tokens null": {"added_tokens": None},
    }  # fmt: skip
    found = {
        f"tokenizer: {name}": functools.partial(_edit_tokenizer, lambda c, change=change: c.update(change))
        for name, change in replaced.items()
    }
    added = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    edits: dict[str, Callable[[Any], Any]] = {
        "merges of strangers": lambda c: c["model"].update(merges=[["x", "yz"]]),
        "merges of three": lambda c: c["model"].update(merges=["a b c"]),
        "merges of numbers": lambda c: c["model"].update(merges=[[1, 2]]),
        "vocabulary of words": lambda c: c["model"].update(vocab={"a": "b"}),
        "vocabulary of negative ids": lambda c: c["model"]["vocab"].update(a=-1),
        "vocabulary of ids beyond": lambda c: c["model"]["vocab"].update(a=10**6),
        "vocabulary of 2^32": lambda c: c["model"]["vocab"].update(a=2**32),
        "vocabulary with one id twice": lambda c: c["model"]["vocab"].update(a=5),
        "vocabulary empty": lambda c: c["model"].update(vocab={}, merges=[]),
        "dropout of 2": lambda c: c["model"].update(dropout=2.0),
        "unknown token missing": lambda c: c["model"].update(unk_token="[missing]"),
        "byte fallback without bytes": lambda c: c["model"].update(byte_fallback=True),
        "prefixes": lambda c: c["model"].update(continuing_subword_prefix="abcdef"),
        "an added token beyond": lambda c: c["added_tokens"].append({**added, "id": 10**6, "content": "<x>"}),
        "an added token of 2^32 - 1": lambda c: c["added_tokens"].append({**added, "id": 2**32 - 1, "content": "<x>"}),
        "an empty added token": lambda c: c["added_tokens"].append({**added, "id": 64, "content": ""}),
        "an added token of 1 MB": lambda c: c["added_tokens"].append({**added, "id": 64, "content": "x" * (1 << 20)}),
        "10,000 added tokens": lambda c: c["added_tokens"].extend(
            {**added, "id": 64 + i, "content": f"<{i}>"} for i in range(10_000)
        ),
        "a vocabulary of 500,000": lambda c: c["model"]["vocab"].update({f"w{i}": 64 + i for i in range(500_000)}),
    }
    found |= {f"tokenizer: {name}": functools.partial(_edit_tokenizer, edit) for name, edit in edits.items()}
    configs: dict[str, dict[str, Any]] = {
        "class unknown": {"tokenizer_class": "Evil"},
        "class of another kind": {"tokenizer_class": "BertTokenizer"},
        "class a number": {"tokenizer_class": 3},
        "class of Llama": {"tokenizer_class": "LlamaTokenizer"},
        "code of its own": {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
        "other files": {"vocab_file": "/etc/passwd", "tokenizer_file": "/etc/passwd"},
        "tokens that are numbers": {"bos_token": 3},
        "tokens beyond": {"added_tokens_decoder": {"1000000": {"content": "<x>", "special": True}}},
        "tokens at words": {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        "template of a number": {"chat_template": 3},
        "longest a word": {"model_max_length": "many"},
        "inputs": {"init_inputs": [1, 2, 3]},
        "another object": {"tokenizer_object": 3, "backend_tokenizer": 3, "__slow_tokenizer": 3},
    }
    for name, change in configs.items():
        found[f"tokenizer config: {name}"] = lambda d, change=change: edit_json(
            d / "tokenizer_config.json", lambda content: content.update(change)
        )
    found["tokenizer config: templates in a FIFO"] = _template_fifo
    return found


def _edit_tokenizer(edit: Callable[[Any], Any], directory: Path) -> None:
    edit_json(directory / "tokenizer.json", lambda content: edit(content) and None)


def _template_fifo(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    os.mkfifo(directory / "additional_chat_templates" / "evil.jinja")


# -- generation_config.json


def _generation() -> dict[str, Spoil]:
    values: dict[str, Any] = {
        "beyond": 64,
        "negative": -1,
        "2^70": 2**70,
        "a word": "end",
        "a list with one beyond": [1, 2, 64],
        "a list of lists": [[1]],
        "true": True,
        "a half": 0.5,
        "100,000 times 1": [1] * 100_000,
        "all": list(range(64)),
    }
    return {
        f"generation_config eos_token_id is {name}": lambda d, value=value: write_json(
            d / "generation_config.json", {"eos_token_id": value}
        )
        for name, value in values.items()
    }
