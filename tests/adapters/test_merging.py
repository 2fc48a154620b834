"""Merged checkpoints: PEFT's numbers, loaded by transformers and the engine, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.adapters import merging
from compiled_llm.adapters.merging import merge_adapter
from compiled_llm.adapters.peft import TENSORS_FILE
from compiled_llm.checkpoint import writing
from compiled_llm.commands.merge_lora import main
from tests.adapters.made import linear_modules, merged, write_adapter
from tests.families import checkpoint, logits_of, transformers_model

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_transformers_loads_the_same_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a family whose weights are transposed; in several shards."""
    monkeypatch.setattr(writing, "_SHARD_BYTES", 40_000)
    model = transformers_model(name)
    modules = linear_modules(model)
    adapter = write_adapter(tmp_path / "adapter", modules, r=4, lora_alpha=8, fan_in_fan_out=name == "gpt2")
    assert main("merge-lora", [str(checkpoint(name)), str(adapter), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "out"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = logits_of(merged(model, dict.fromkeys(modules, 2.0), adapter), PROMPT)
    torch.testing.assert_close(logits_of(loaded, PROMPT), expected, atol=1e-4, rtol=0)
    assert (logits_of(model, PROMPT) - expected).abs().max() > 0.1


def test_the_engine_serves_it_as_the_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", linear_modules(transformers_model("qwen3")), use_rslora=True)
    merge_adapter(checkpoint("qwen3"), adapter, tmp_path / "out")
    found = []
    for model, request in ((checkpoint("qwen3"), LoRARequest("x", str(adapter))), (tmp_path / "out", None)):
        with CompiledEngine(
            str(model), dtype="float32", enforce_eager=True, progress="off", bucket_sizes=(1,),
            token_bucket_sizes=(32,), num_kv_blocks=8, max_model_len=64, enable_lora=request is not None,
        ) as engine:  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
            (output,) = engine.generate(PROMPT.tolist(), params, lora_request=request, use_tqdm=False)
        rows = output.outputs[0].logprobs
        assert rows is not None
        found.append((output.outputs[0].token_ids, [next(iter(row.values())).logprob for row in rows]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


def test_weights_are_rounded_once(tmp_path: Path) -> None:
    model = transformers_model("qwen3").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    modules = linear_modules(model)
    adapter = write_adapter(tmp_path / "adapter", modules)
    merge_adapter(tmp_path / "base", adapter, tmp_path / "out")
    name, tensors = next(iter(modules)), load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    base, out = (load_file(tmp_path / which / "model.safetensors") for which in ("base", "out"))
    assert torch.equal(out[f"{name}.weight"], (base[f"{name}.weight"].float() + 2.0 * (b @ a)).to(torch.bfloat16))


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = linear_modules(transformers_model("qwen3"))
    adapter = write_adapter(tmp_path / "adapter", modules)
    base, out = checkpoint("qwen3"), tmp_path / "out"
    name = next(iter(modules))
    others = {
        "head": write_adapter(tmp_path / "head", {"lm_head": (8, 8)}),
        "shape": write_adapter(tmp_path / "shape", {name: (3, 3)}),
        "missing": write_adapter(tmp_path / "missing", {name: modules[name]}, target_modules=["q_proj"]),
        "dora": write_adapter(tmp_path / "dora", {name: modules[name]}),
        "tokens": write_adapter(tmp_path / "tokens", {name: modules[name]}, trainable_token_indices=[1, 2]),
        "integers": write_adapter(tmp_path / "integers", {name: modules[name]}, dtype=torch.int32),
        "twice": write_adapter(tmp_path / "twice", dict.fromkeys((name, name.removeprefix("model.")), modules[name])),
    }
    tensors = load_file(others["dora"] / "adapter_model.safetensors")
    save_file(tensors | {f"base_model.model.{name}.lora_magnitude_vector": torch.ones(3)},
              others["dora"] / "adapter_model.safetensors")  # fmt: skip
    for which, words in (
        ("head", "or whole heads and embeddings, alone, found"),
        ("shape", "by the model and the rank"),
        ("missing", "target_modules or modules_to_save names modules without tensors"),
        ("dora", "lora_magnitude_vector"),
        ("tokens", "found target_parameters or tokens"),
        ("integers", "of I32"),
        ("twice", "alone, found"),
    ):
        with pytest.raises(ValueError, match=words):
            merge_adapter(base, others[which], out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main("merge-lora", [str(base), str(adapter), str(tmp_path / "full")])
    assert "OUT must be a new or empty directory" in capsys.readouterr().err
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    fields = json.loads((base / "config.json").read_text())
    plan = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": plan}))
    with pytest.raises(ValueError, match="must not be quantised"):
        merge_adapter(quantized, adapter, out)
    assert not out.exists()


def test_an_interrupted_merge_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "adapter", linear_modules(transformers_model("qwen3")))

    def interrupted(*arguments: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(merging, "_sum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(checkpoint("qwen3"), adapter, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_whole_heads_and_embeddings(tmp_path: Path) -> None:
    """As the adapter has them; a tied pair would come apart, and is refused."""
    model, generator = transformers_model("llama-biases"), torch.Generator().manual_seed(0)
    own = {
        f"base_model.model.{name}.weight": torch.randn(model.lm_head.weight.shape, generator=generator)
        for name in ("lm_head", "model.embed_tokens")
    }
    for name in ("llama-biases", "qwen3"):
        modules = linear_modules(transformers_model(name))
        path = write_adapter(tmp_path / name, modules, modules_to_save=["lm_head", "embed_tokens"]) / TENSORS_FILE
        brought = own if name == "llama-biases" else {key: own[key] for key in own if "embed" in key}
        save_file(load_file(path) | brought, path)
    merge_adapter(checkpoint("llama-biases"), tmp_path / "llama-biases", tmp_path / "out")
    merged_tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, matrix in own.items():
        assert torch.equal(merged_tensors[name.removeprefix("base_model.model.")], matrix)
    with pytest.raises(ValueError, match="which are one in the model"):
        merge_adapter(checkpoint("qwen3"), tmp_path / "qwen3", tmp_path / "other")
