"""Kinds of quantised weights beside the model's dtype: what is made of times, and the command."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.__main__ import main
from compiled_llm.api.config import QUANTIZATIONS, EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.ops.linear.compressed_linear import empty_compressed
from compiled_llm.tuning import quantization
from compiled_llm.tuning.quantization import Cycle, Group, Layer, Measured, Noting, Step

DEMO: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text())
COMMAND = ["tune", "quantization", "--seconds", "0"]
IN_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}


def with_times(monkeypatch: pytest.MonkeyPatch, kind_seconds: dict[str, float]) -> None:
    """Every layer takes 1 s in the model's dtype; in a kind what ``kind_seconds`` says for its last word, or 0.5."""

    def seconds(self: Cycle, step: Step, inputs: Any) -> list[float]:
        found: dict[int, float] = {}
        for place, layer, linear in self._order:
            word = layer.parts[0].name.rpartition(".")[2]
            found[place] = 1.0 if isinstance(linear, Packed) else kind_seconds.get(f"{word} {step.name}", 0.5)
        return [found[place] for place in sorted(found)]

    monkeypatch.setattr(Cycle, "seconds", seconds)


def found_of(kinds: tuple[str, ...] = ("int8",), **arguments: Any) -> quantization.Result:
    named = {kind: EngineConfig(quantization=kind, **arguments) for kind in kinds}
    return quantization.tune(EngineConfig(), named, [1, 8], 64, 0)


def test_layers_that_are_slower_at_some_number_of_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, {"down_proj 8 rows": 2.0, "q_proj prompt of 64": 1.1})
    found = found_of().found["int8"]
    assert found.skip == ("q_proj", "k_proj", "v_proj", "down_proj")
    assert {name: round(ratio, 3) for name, ratio in found.ratios.items()} == {
        "1 row": 2.0,
        "8 rows": round(17 / (0.5 * 13 + 2 * 4), 3),
        "prompt of 64": round(17 / (0.5 * 13 + 1.1 * 4), 3),
    }, "four layers with four products, and the head"
    assert found.is_never_slower, "the others make up for it"
    assert all(round(ratio, 3) == round(17 / (8 + 0.5 * 9), 3) for ratio in found.skip_ratios.values())
    config = EngineConfig(**found.arguments(found.skip))
    assert (config.quantization, config.quantization_skip) == ("int8", found.skip)


def test_what_is_left_makes_no_layer_slower_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags that are printed, given to the command, leave these layers as they are in the model's dtype."""
    with_times(monkeypatch, {"down_proj 8 rows": 2.0})
    first = found_of().found["int8"]
    assert first.skip == ("down_proj",)
    again = found_of(quantization_skip=first.skip).found["int8"]
    assert [one.group.is_rounded for one in again.layers].count(False) == 1
    assert not any(one.is_slower for one in again.layers)
    assert (again.skip, again.arguments(again.skip)) == ((), first.arguments(first.skip))
    assert again.ratios == first.skip_ratios


def test_layers_that_are_left_already_make_no_pattern_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern may match them too."""
    with_times(monkeypatch, {"down_proj 8 rows": 2.0})
    found = found_of(quantization_skip=("layers.0",)).found["int8"]
    assert found.skip == ("down_proj",)
    assert found.arguments(found.skip)["quantization_skip"] == ("layers.0", "down_proj")


def test_a_layer_of_which_a_part_is_left_already_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, {"q_proj 8 rows": 2.0})
    found = found_of(quantization_skip=("q_proj",)).found["int8"]
    assert found.arguments(found.skip or ())["quantization_skip"] == ("q_proj", "k_proj", "v_proj")


def test_a_kind_that_is_slower_everywhere_has_nothing_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("embed_tokens", "q_proj", "o_proj", "gate_proj", "down_proj")
    with_times(monkeypatch, {f"{word} 1 row": 3.0 for word in words})
    result = found_of()
    assert (result.found["int8"].skip, result.fastest) == (None, None)
    text = quantization.text_of(result)
    assert "int8: layers with 100% of the bytes are slower than in bfloat16" in text
    assert "which are all that it rounds" in text
    assert "keep bfloat16\n" in text, "no layers are named that could be left"
    assert quantization.as_json(result)["kinds"]["int8"]["ratios_never_slower"] is None


def test_the_fastest_is_chosen_among_those_that_are_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(config: EngineConfig, *_: Any) -> quantization.Found:
        ratios = {"int8": (1.2, 1.2), "int4": (5.0, 0.9), "fp8": (1.5, 1.1)}[str(config.quantization)]
        steps = {f"{number}": ratio for number, ratio in enumerate(ratios)}
        return quantization.Found(config, 1, 2, [], {}, steps, (), steps)

    monkeypatch.setattr(quantization, "measure", measure)
    assert found_of(("int8", "int4", "fp8")).fastest == "fp8"


def test_what_interrupts_most_rounds_makes_nothing_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten rounds two are free of other processes: they count."""
    monkeypatch.setattr(quantization, "LEAST_ROUNDS", 10)
    late = itertools.cycle([9.0, 0.0, 7.0, 8.0, 5.0, 0.0, 6.0, 3.0, 4.0, 7.0])

    def seconds(self: Cycle, step: Step, inputs: Any) -> list[float]:
        is_plain = any(isinstance(linear, Packed) for _, _, linear in self._order)
        return [1.0 + (0.0 if is_plain else next(late) - 0.1)] * self._groups

    monkeypatch.setattr(Cycle, "seconds", seconds)
    found = found_of().found["int8"]
    assert {round(ratio, 3) for ratio in found.ratios.values()} == {round(1 / 0.9, 3)}
    assert found.skip == ()


def test_patterns_match_no_other_layer() -> None:
    noting = Noting(Packed)
    inputs = {"down_proj": 8, "o_proj": 4}
    for name in ("layers.0.mlp.down_proj", "layers.0.attn.o_proj", "layers.1.shared.down_proj", "layers.1.attn.o_proj"):
        part = StoredLinear(name, 4, inputs[name.rpartition(".")[2]])
        noting.layers.append(Layer((part,), Packed(torch.empty(0), None, 4, part.in_features), torch.float32))

    def patterns(*places: int) -> tuple[str, ...]:
        layer = noting.layers[places[0]]
        kept = Measured(Group(places, layer, layer), {}, {}, {})
        others = tuple(place for place in range(4) if place not in places)
        return quantization.skip_patterns([kept], [kept, Measured(Group(others, layer, layer), {}, {}, {})], noting)

    assert patterns(0, 2) == ("down_proj",)
    assert patterns(2) == ("shared.down_proj",)
    assert patterns(1) == ("layers.0.attn.o_proj",), "the same words as another layer but for the number"
    noting.expert_parts.append(StoredLinear("layers.1.experts.0.down_proj", 4, 8))
    assert patterns(0, 2) == ("mlp.down_proj", "shared.down_proj"), "experts are not measured"


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_layers_of_constants_compute_as_those_of_a_checkpoint(kind: str) -> None:
    """Numbers of each kind that are finite, so that no product is slow or fast by its values."""
    result = quantization.tune(EngineConfig(), {kind: EngineConfig(quantization=kind)}, [2], 0, 0)
    for one in result.found[kind].layers:
        meta = one.group.quantised.linear
        linear = quantization.with_contents(meta)
        assert quantization.signature(linear) == quantization.signature(meta)
        assert linear.nbytes == meta.nbytes
        out = linear.apply(torch.ones(2, linear.in_features, dtype=torch.bfloat16))
        assert out.shape == (2, linear.out_features)
        assert out.isfinite().all()
        assert (out != 0).all()
        assert min(one.seconds["2 rows"], one.plain_seconds["2 rows"]) > 0


def test_compressed_layers_of_constants_compute() -> None:
    if not Compressed.serves(torch.device("cpu"), torch.bfloat16):
        pytest.skip("for CPUs with AVX512-BF16")
    linear = quantization.with_contents(Compressed(empty_compressed(70, 32, torch.device("meta")), None, 70, 32))
    out = linear.apply(torch.ones(2, 32, dtype=torch.bfloat16))
    assert out.isfinite().all()
    assert (out != 0).all()


def test_a_large_model_is_measured_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    part = StoredLinear("layers.0.a", 64, 64)
    layer = Layer(
        (part,), Packed(torch.empty(4, 64, 16, dtype=torch.bfloat16, device="meta"), None, 64, 64), torch.bfloat16
    )
    head = layer._replace(parts=(part._replace(role="head"),))
    monkeypatch.setattr(quantization, "CYCLE_BYTES", 20 * layer.linear.nbytes)
    order = [one.is_head for _, one, _ in Cycle([39, 1], [layer, head])._order]
    assert order == [False] * 19 + [True]


@pytest.mark.parametrize(("rows", "runs"), [(8, 7), (256, quantization.FEW_COPIES)])
def test_what_runs_in_a_round(rows: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has the rows of logits alone; with many rows a few layers of a size are enough."""
    part = StoredLinear("layers.0.a", 64, 64)
    empty = torch.empty(4, 64, 16, dtype=torch.bfloat16, device="meta")
    layer = Layer((part,), Packed(empty, None, 64, 64), torch.bfloat16)
    head = layer._replace(parts=(part._replace(role="head"),))
    seen: list[int] = []
    monkeypatch.setattr(Packed, "apply", lambda self, x: seen.append(len(x)))
    inputs = {(64, torch.bfloat16): torch.zeros(rows, 64, dtype=torch.bfloat16)}
    seconds = Cycle([7, 1], [layer, head]).seconds(Step("", rows, 1), inputs)
    assert seen == [rows] * runs + [1]
    assert min(seconds) > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--quantization", "int8,int4_w4a8", "--quantization-group-size", "64", "--rows", "1", "4"]
    assert main([*COMMAND, *flags, "--prompt-tokens", "0", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert (result["dtype"], result["expert_nbytes"], set(result["kinds"])) == ("bfloat16", 0, {"int8", "int4_w4a8"})
    assert result["kinds"]["int4_w4a8"]["arguments"] == {"quantization": "int4_w4a8", "quantization_group_size": 64}
    for one in result["kinds"].values():
        EngineConfig(**one["arguments"])
        assert set(one["ratios"]) == {"1 row", "4 rows"}
        assert min(one["rounds"].values()) >= quantization.LEAST_ROUNDS
        assert sum(layer["count"] for layer in one["layers"]) == 17
        assert sum(layer["count"] * layer["nbytes"] for layer in one["layers"]) == one["nbytes"] < one["plain_nbytes"]
    assert "gate_proj,up_proj" in printed
    assert "embed_tokens (head)" in printed


def directory_of(tmp_path: Path, config: Mapping[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def quantised_directory(tmp_path: Path) -> Path:
    return directory_of(tmp_path, DEMO | {"tie_word_embeddings": False, "quantization_config": IN_GROUPS})


def test_a_quantised_checkpoint_is_measured_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(quantised_directory(tmp_path)), "--rows", "1", "--prompt-tokens", "0"]
    assert main([*COMMAND, *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: one["arguments"] for name, one in result["kinds"].items()} == {
        "checkpoint": {"quantization_activations": "model"},
        "checkpoint, int8 activations": {"quantization_activations": "int8"},
    }
    for one in result["kinds"].values():
        assert [layer["rounded"] for layer in one["layers"] if "lm_head" in layer["layers"]] == [False]
        assert one["arguments_never_slower"] is None


def test_a_quantised_checkpoint_that_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, {f"{word} 1 row": 3.0 for word in ("q_proj", "o_proj", "gate_proj", "down_proj")})
    model = EngineConfig(model=str(quantised_directory(tmp_path)))
    text = quantization.text_of(quantization.tune(model, {}, [1], 0, 0))
    assert text.endswith("at some number of rows: load the model before it was quantised, in bfloat16")


def test_a_checkpoint_of_which_the_experts_alone_are_quantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "num_local_experts": 4, "vocab_size": 256}
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    model = directory_of(tmp_path, SHAPES["gpt-oss-20b-2l"] | sizes | mxfp4)
    assert main([*COMMAND, "--model", str(model), "--rows", "1", "--prompt-tokens", "0"]) == 0
    *printed, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["expert_nbytes"] == 2 * 4 * ((128 * 64 + 128) + (64 * 64 + 64)) * 2
    assert {layer["rounded"] for layer in result["kinds"]["checkpoint"]["layers"]} == {False}
    assert printed[-1] == "None of the layers here is quantised"


def test_all_layers_may_be_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--quantization", "int8", "--quantization-skip", "*", "--rows", "1"]) == 0
    *printed, line = capsys.readouterr().out.splitlines()
    assert set(json.loads(line)["kinds"]["int8"]["ratios"].values()) == {1.0}
    assert printed[-1] == "None of the layers here is quantised"


def test_other_kinds_of_a_quantised_checkpoint_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, "--model", str(quantised_directory(tmp_path)), "--quantization", "int8"])
    assert ended.value.code == 2
    assert "is quantised already, given int8" in capsys.readouterr().err
