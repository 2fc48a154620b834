"""PEFT's files: what is read of them, and what is refused, by which message."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm.adapters.peft import Adapter, read_adapter
from compiled_llm.adapters.peft_config import PeftConfig
from compiled_llm.models.linears.adapted import Adaptable, AnyPlace
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import StoredLinear
from tests.adapters.made import write_adapter

SHAPES = {
    f"model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {
        "self_attn.q_proj": (32, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 32), "mlp.down_proj": (16, 24),
    }.items()
}  # fmt: skip
BASE = "base_model.model."
Q = f"{BASE}model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


class Zeros:
    """A ``Take`` of zeros."""

    dtype, device = torch.float32, torch.device("cpu")

    def rows(self, shapes: Any, put: Any) -> None: ...


def places(**changes: Any) -> dict[str, AnyPlace]:
    kind = Adaptable(Dense, 1, 8)
    for name, shape in SHAPES.items():
        kind.take(Zeros(), [StoredLinear(name, *shape, **changes)])  # type: ignore[arg-type]
    return kind.places


def read(directory: Path, most_rank: int = 8, **changes: Any) -> Adapter:
    return read_adapter("mine", directory, places(**changes), most_rank)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", SHAPES)


STACK = "model.layers.0.mlp.experts"


def of_experts(**changes: Any) -> dict[str, AnyPlace]:
    """Places of three experts, as transformers and as older checkpoints name them."""
    kind, each = Adaptable(Dense, 1, 8, ("experts",)), range(3)
    for names, outputs, inputs in ((("gate_proj", "up_proj"), 24, 16), (("down_proj",), 16, 24)):
        stacked = f"{STACK}.{'down_proj' if len(names) == 1 else 'gate_up_proj'}"
        parts = [
            [StoredLinear(f"{STACK}.{e}.{name}", outputs, inputs, stacked=stacked, **changes) for name in names]
            for e in each
        ]
        kind.take_experts(Zeros(), parts, 1)  # type: ignore[arg-type]
    return kind.places


def test_experts_are_read_by_either_name(tmp_path: Path) -> None:
    """Those of transformers' parameters for all are what single ones by their own names are."""
    stacks = {f"{STACK}.base_layer": (3, 48, 16), STACK: (3, 16, 24)}
    fields = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 2}
    path = write_adapter(tmp_path / "stacked", {}, {}, stacks, **fields)
    stacked = read_adapter("stacked", path, of_experts(), 8).changes
    assert sorted(stacked) == [f"{STACK}.*.{name}_proj" for name in ("down", "gate", "up")]
    held = load_file(path / "adapter_model.safetensors")
    single: dict[str, Tensor] = {}
    for module, names in ((f"{STACK}.base_layer", ("gate_proj", "up_proj")), (STACK, ("down_proj",))):
        a = held[f"{BASE}{module}.lora_A.weight"].unflatten(0, (3, 2))
        b = held[f"{BASE}{module}.lora_B.weight"].unflatten(1, (2, 3)).permute(2, 0, 1)
        for e in range(3):
            for name, rows in zip(names, b[e].chunk(len(names)), strict=True):
                single[f"{BASE}{STACK}.{e}.{name}.lora_A.weight"] = a[e].clone()
                single[f"{BASE}{STACK}.{e}.{name}.lora_B.weight"] = rows.clone()
    other = write_adapter(tmp_path / "single", {}, target_modules=["gate_proj", "up_proj", "down_proj"], r=2)
    save_file(single, other / "adapter_model.safetensors")
    for name, change in read_adapter("single", other, of_experts(), 8).changes.items():
        assert torch.equal(change.a, stacked[name].a)
        assert torch.equal(change.b, stacked[name].b)
        assert torch.equal(change.scale, stacked[name].scale)
    edit_tensors(other, lambda held: [held.pop(name) for name in list(held) if ".experts.1.up_proj." in name])
    with pytest.raises(ValueError, match=r"names modules without tensors.*experts\.1\.up_proj"):
        read_adapter("single", other, of_experts(), 8)
    edit_config(other, target_modules=[])
    change = read_adapter("single", other, of_experts(), 8).changes[f"{STACK}.*.up_proj"]
    assert not change.b[1].any()
    assert change.b[0].any()


def test_stacks_that_may_be_the_other_way_round(tmp_path: Path) -> None:
    """Of PEFT before 0.19, where sizes do not tell."""
    kind = Adaptable(Dense, 1, 8, ("experts",))
    parts = [[StoredLinear(f"{STACK}.{e}.x", 16, 16, stacked=f"{STACK}.x")] for e in range(3)]
    kind.take_experts(Zeros(), parts, 1)  # type: ignore[arg-type]
    path = write_adapter(tmp_path / "a", {}, {}, {STACK: (3, 16, 16)}, target_parameters=["experts.x"])
    assert read_adapter("a", path, kind.places, 8).changes
    edit_config(path, peft_version="0.18.1")
    with pytest.raises(ValueError, match=r"PEFT before 0\.19 kept them the other way round"):
        read_adapter("a", path, kind.places, 8)


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_reads_every_tensor(path: Path) -> None:
    adapter, tensors = read(path), load_file(path / "adapter_model.safetensors")
    assert adapter.changes.keys() == SHAPES.keys()
    change = adapter.changes["model.layers.0.self_attn.v_proj"]
    assert torch.equal(change.a, tensors[f"{BASE}model.layers.0.self_attn.v_proj.lora_A.weight"])
    b = change.b.transpose(1, 2).flatten(0, 1)
    assert torch.equal(b[:8], tensors[f"{BASE}model.layers.0.self_attn.v_proj.lora_B.weight"])
    assert not b[8:].any()
    assert change.scale == 2
    assert repr(adapter).startswith("<Adapter 'mine': 8 layers, ")


def test_rows_and_columns_are_in_the_order_of_the_model(path: Path) -> None:
    plain, turned = read(path), read(path, arrange=lambda rows: rows.flip(0), arrange_inputs=lambda rows: rows.flip(0))
    name = "model.layers.1.self_attn.o_proj"
    assert torch.equal(turned.changes[name].a, plain.changes[name].a.flip(1))
    assert torch.equal(turned.changes[name].b, plain.changes[name].b.flip(0, 2))


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "transformer."])
def test_modules_may_lie_within_others(prefix: str, tmp_path: Path) -> None:
    modules = {prefix + name.removeprefix("model."): shape for name, shape in SHAPES.items()}
    assert read(write_adapter(tmp_path / "adapter", modules)).changes.keys() == SHAPES.keys()


def test_the_digest_is_of_the_content(path: Path, tmp_path: Path) -> None:
    digest = read(path).digest
    shutil.copytree(path, tmp_path / "copy")
    edit_config(tmp_path / "copy", lora_dropout=0.5, base_model_name_or_path="x", rank_pattern={"q_proj": 4})
    assert read(tmp_path / "copy").digest == digest
    edit_config(tmp_path / "copy", lora_alpha=9)
    other = read(tmp_path / "copy").digest
    edit_tensors(path, lambda tensors: tensors[A].mul_(2))
    assert len({digest, other, read(path).digest}) == 3


def test_the_digest_is_of_what_the_tensors_change(tmp_path: Path) -> None:
    """The same ones of another expert; of an embedding, and of the head that it is as well."""
    digests = set()
    for expert in range(2):
        module = f"{STACK}.{expert}.up_proj"
        path = write_adapter(tmp_path / f"{expert}", {module: (24, 16)}, target_modules=[module])
        digests.add(read_adapter("mine", path, of_experts(), 8).digest)
    kind = Adaptable(Dense, 1, 8, ("lm_head", "embed_tokens"))
    part = StoredLinear("model.embed_tokens", 48, 16, also="lm_head", role="head")
    kind.take(Zeros(), [part])  # type: ignore[arg-type]
    for ties in (False, True):
        path = write_adapter(tmp_path / f"{ties}", {}, {part.name: (48, 16)}, ensure_weight_tying=ties)
        adapter = read_adapter("mine", path, kind.places, 8)
        assert len(adapter.changes) == 1 + ties
        digests.add(adapter.digest)
    assert len(digests) == 4


def test_messages_name_the_base_model_of_the_adapter(path: Path) -> None:
    edit_tensors(path, lambda tensors: tensors.update({A: torch.zeros(4, 17)}))
    edit_config(path, base_model_name_or_path="org/model", revision="0a1b")
    with pytest.raises(ValueError, match=r"own base model \(org/model, revision 0a1b\), or save"):
        read(path)


@pytest.mark.parametrize(
    ("fields", "module", "expected"),
    [
        ({}, "model.layers.0.self_attn.q_proj", (8, 2.0)),
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", (8, 16 / math.sqrt(8))),
        ({"rank_pattern": {"q_proj": 4}}, "model.layers.0.self_attn.q_proj", (4, 4.0)),
        ({"rank_pattern": {"q_proj": 4}}, "model.layers.0.self_attn.xq_proj", (8, 2.0)),
        ({"rank_pattern": {"^q_proj": 4}}, "model.layers.0.self_attn.q_proj", (8, 2.0)),  # as PEFT has it
        ({"rank_pattern": {"^model.layers.0.self_attn.q_proj": 4}}, "model.layers.0.self_attn.q_proj", (4, 4.0)),
        ({"rank_pattern": {r"layers\.[01]\..*_proj": 2}}, "model.layers.0.self_attn.q_proj", (2, 8.0)),
        ({"rank_pattern": {"v_proj": 2, "q_proj": 4, "self_attn.q_proj": 1}}, "a.self_attn.q_proj", (4, 4.0)),
        ({"alpha_pattern": {"q_proj|v_proj": 4}}, "model.layers.0.self_attn.q_proj", (8, 0.5)),
        (
            {"alpha_pattern": {"q_proj": 6}, "rank_pattern": {"q_proj": 2}, "use_rslora": True},
            "x.q_proj",
            (2, 6 / 2**0.5),
        ),
    ],
)
def test_ranks_and_scales(fields: dict[str, Any], module: str, expected: tuple[int, float], tmp_path: Path) -> None:
    config = PeftConfig.read(write_adapter(tmp_path / "a", {}, r=8, lora_alpha=16, **fields))
    assert (config.rank_of(module), config.scale_of(module)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "is_complete"),
    [
        ({"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}, False),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, True),
        ({"target_modules": [*SHAPES]}, False),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": r".*\.(q|v|o)_proj"}, True),
        ({"target_modules": ["down_proj", "q_proj"], "exclude_modules": ["mlp.down_proj"]}, True),
        ({"target_modules": ["down_proj"], "layers_to_transform": 7}, True),
        ({"target_modules": ["down_proj"], "layers_to_transform": [0]}, False),
    ],
)
def test_modules_that_are_named_have_tensors(fields: dict[str, Any], is_complete: bool, tmp_path: Path) -> None:
    modules = {name: shape for name, shape in SHAPES.items() if not name.endswith("down_proj")}
    path = write_adapter(tmp_path / "adapter", modules, **fields)
    if is_complete:
        assert read(path).changes.keys() == modules.keys()
    else:
        with pytest.raises(ValueError, match=r"names modules without tensors in .*layers\.0\.mlp\.down_proj"):
            read(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be 'LORA', given 'LOHA'"),
        ({"use_dora": True}, "use_dora must not be set, given True. This is a DoRA.*merge_and_unload"),
        ({"lora_bias": True}, "lora_bias must not be set"),
        ({"bias": "all"}, "bias must be 'none', given 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must have none.*found a whole module's lm_head"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices names modules without tensors"),
        ({"trainable_token_indices": {"x": 1}}, "trainable_token_indices must be a list of tokens"),
        ({"trainable_token_indices": [1, 1]}, "must have each token once"),
        ({"target_parameters": "experts"}, "target_parameters must be a list of names"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens must not be set.*activated"),
        ({"layer_replication": [[0, 2]]}, "layer_replication must not be set"),
        ({"use_qalora": True}, "use_qalora must not be set"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora must not be set"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config must not be set"),
        ({"init_lora_weights": "pissa_niter_4"}, "given 'pissa_niter_4'.*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "changes the base model's weights"),
        ({"init_lora_weights": 1}, "init_lora_weights must be one of"),
        ({"kasa_config": {"beta": 1}}, "'kasa_config' is a field that is not known here"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"r": 0}, "r must have integers from 1"),
        ({"r": "8"}, "r must have integers from 1"),
        ({"lora_alpha": None}, "lora_alpha must have finite numbers"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern must have integers"),
        ({"rank_pattern": {"(a+)+": 1}}, "none of a group"),
        ({"rank_pattern": {"a*a*a*a*": 1}}, "at most 3 repetitions"),
        ({"alpha_pattern": {"[": 1}}, "alpha_pattern must have regular expressions"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must have finite numbers"),
        ({"target_modules": [1]}, "target_modules must be a list of names"),
        ({"exclude_modules": {"a": 1}}, "exclude_modules must be a list of names"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be an integer"),
        ({"rank_pattern": {"q_proj": 3}}, r"must be \[3, 16\], by the base model and the rank 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str, path: Path) -> None:
    edit_config(path, **fields)
    with pytest.raises(ValueError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(B), "lacks tensors whose counterparts it has: .*q_proj.lora_B.weight"),
        (lambda tensors: tensors.clear(), "holds no tensor"),
        (
            lambda tensors: tensors.update({"q.lora_A.weight": tensors.pop(A)}),
            "must have tensors base_model.model.MODULE",
        ),
        (put(f"{Q}.lora_magnitude_vector", torch.ones(32)), "q_proj.lora_magnitude_vector', a DoRA's"),
        (put(f"{Q}.lora_B.bias", torch.ones(32)), "lora_B.bias', a bias"),
        (put(f"{BASE}x.lora_embedding_A", torch.ones(4, 9)), "lacks tensors whose counterparts.*x.lora_embedding_B"),
        (put(f"{BASE}lm_head.base_layer.weight", torch.ones(4, 9)), "lacks tensors.*lm_head.lora_A.weight"),
        (put(f"{BASE}lm_head.weight", torch.ones(4, 9)), "found a whole module's lm_head"),
        (put(f"{Q}.lora_A.default.weight", torch.ones(4, 9)), "found 'base_model.model.*lora_A.default.weight'"),
        (put(A, torch.ones(4, 17)), r"lora_A.weight must be \[4, 16\].*found \[4, 17\]"),
        (put(B, torch.ones(31, 4)), r"lora_B.weight must be \[32, 4\].*found \[31, 4\]"),
        (put(A, torch.ones(4, 16, 1)), r"found \[4, 16, 1\]"),
        (put(A, torch.ones(4, 16, dtype=torch.float64)), "must be in F32, F16, BF16, found F64"),
        (put(A, torch.full((4, 16), torch.nan)), "must have finite numbers in float32"),
    ],
)
def test_tensors_that_are_refused(change: Callable[[dict[str, Tensor]], Any], message: str, path: Path) -> None:
    edit_tensors(path, change)
    with pytest.raises(ValueError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "module", ["lm_head", "model.embed_tokens", "vision.layers.0.self_attn.q_proj", "model.layers.9.o"]
)
def test_modules_that_are_not_of_the_model(module: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", SHAPES | {module: (32, 16)})
    with pytest.raises(
        ValueError, match=f"changes modules that this engine lets no adapter change: {module}. It lets them change"
    ):
        read(path)


def test_a_rank_that_no_slot_has_room_for(path: Path) -> None:
    with pytest.raises(ValueError, match="at most the engine's max_lora_rank, 3, found 4: give max_lora_rank=4"):
        read(path, most_rank=3)


def break_file(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / name
        file.unlink() if content is None else file.write_bytes(content)

    return change


def lengthen(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes() + b"0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_file("adapter_config.json", None), "no such file"),
        (break_file("adapter_config.json", b"{"), "not readable as JSON"),
        (break_file("adapter_config.json", b"[]"), "must hold a JSON object"),
        (break_file("adapter_model.safetensors", None), "no such file"),
        (break_file("adapter_model.safetensors", b""), "not a safetensors file"),
        (break_file("adapter_model.safetensors", b"\x80\x02}q\x00." * 9), "not a safetensors file"),
        (lengthen, "where its header says"),
    ],
)
def test_files_that_are_broken(change: Callable[[Path], Any], message: str, path: Path) -> None:
    change(path)
    with pytest.raises(ValueError, match=message):
        read(path)
