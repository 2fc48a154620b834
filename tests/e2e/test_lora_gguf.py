"""Adapters over GGUF files, which have rows in other orders, and other names, than what adapters were trained on."""

from pathlib import Path

import pytest
import torch

from compiled_llm import CompiledEngine, LoRARequest
from tests.adapters.made import embeddings_and_stacks, linear_modules, write_adapter
from tests.checkpoint.gguf.writing import MODELS, hub_checkpoint, metadata_of, model_of, tensors_of, write
from tests.drawn import marked
from tests.e2e.test_lora import LORA, PARAMS, PROMPTS, SIZES, logprobs_of

# Layers that files have in parts.
REFUSED = {
    "deepseek2": ("kv_b_proj",), "deepseek2 in blocks": ("kv_b_proj",), "qwen3next": ("in_proj_qkvz",),
    "gpt-oss": ("experts",), "granitehybrid": ("shared_mlp",), "granitehybrid with experts": ("shared_mlp", "experts"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:max_model_len=96 is longer than original_max_position_embeddings")
@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("name", marked(MODELS, ["qwen35"]))
def test_log_probabilities_are_those_over_the_hubs_checkpoint(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    file = write(tmp_path / "model.gguf", MODELS[name][0], metadata_of(name), tensors_of(name))
    modules, (embeddings, stacks) = linear_modules(model), embeddings_and_stacks(model)
    if not model.config.tie_word_embeddings:
        modules["lm_head"] = tuple(model.lm_head.weight.shape)
    embeddings = {layer: shape for layer, shape in embeddings.items() if not layer.endswith("wpe")}
    found = list[torch.Tensor]()
    for base in (file, hub_checkpoint(name)):
        with CompiledEngine(str(base), dtype="float32", **SIZES, **LORA, lora_target_modules=("*",)) as engine:
            if base == file and name in REFUSED:
                request = LoRARequest("x", str(write_adapter(tmp_path / "refused", modules, {}, stacks)))
                with pytest.raises(ValueError, match=rf"lets no adapter change: .*{REFUSED[name][0]}"):
                    engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
                left_out = [layer for layer in (*modules, *stacks) if any(part in layer for part in REFUSED[name])]
                for layer in left_out:
                    modules.pop(layer, None)
                    stacks.pop(layer, None)
            if not found:
                path = write_adapter(tmp_path / "adapter", modules, embeddings, stacks)
            request = LoRARequest("x", str(path))
            for adapter in (request, None):
                (output,) = engine.generate(
                    [PROMPTS[0]], PARAMS, lora_request=adapter, use_tqdm=False, raise_on_error=True
                )
                found.append(torch.tensor(logprobs_of(output)))
    ours, plain, theirs, _ = found
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (plain - theirs).abs().max() > 0.1, "the adapter changes too little to be seen"
