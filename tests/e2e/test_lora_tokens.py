"""Adapters with tokens that the base model's tokenizer lacks: rows that its vocabulary has to spare, and more rows."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from compiled_llm import CompiledEngine, SamplingParams
from tests.e2e.test_lora import PARAMS, PROMPTS, SIZES, logprobs_of
from tests.e2e.test_lora_whole import EMBEDDING, HEAD, TARGETS, WHOLE, matrices_of, write_whole
from tests.families import checkpoint, logits_of, transformers_model

KNOWN, ADDED = 300, "<|sql|>"  # tokens of the model's tokenizer, whose vocabulary has 307 rows; and one behind them


def write_tokenizer(directory: Path, added: list[str]) -> None:
    """Of words "w0" to "w299", and ``added`` tokens."""
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(KNOWN)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def test_tokens_within_the_vocabulary(tmp_path: Path) -> None:
    """The engine has the tokenizer of the adapter's directory, by ``tokenizer``; the row is the adapter's alone."""
    model = copy.deepcopy(transformers_model("qwen3"))
    request = write_whole(tmp_path / "sql", "qwen3", {}, lora_alpha=0, trainable_token_indices=[KNOWN])
    row = model.get_input_embeddings().weight.data[KNOWN] + 0.5
    file = tmp_path / "sql" / "adapter_model.safetensors"
    key = EMBEDDING.replace(".weight", ".token_adapter.trainable_tokens_delta")
    save_file({**load_file(file), key: row[None].clone()}, file)
    write_tokenizer(tmp_path / "sql", [ADDED])
    write_tokenizer(tmp_path / "base", [])
    text, words = f"w7 w5 {ADDED} w9", [7, 5, KNOWN, 9]
    found = {}
    for name in ("sql", "base"):
        arguments: dict[str, Any] = {**SIZES, **WHOLE, "lora_target_modules": TARGETS}
        with CompiledEngine(
            str(checkpoint("qwen3")), tokenizer=str(tmp_path / name), dtype="float32", **arguments
        ) as engine:
            given = {"lora_request": request, "use_tqdm": False, "raise_on_error": True}
            (output,) = engine.generate([text], PARAMS, **given)
            found[name] = output
            only = SamplingParams(
                max_tokens=2, allowed_token_ids=[KNOWN], skip_special_tokens=False, ignore_eos=True, temperature=0
            )
            (spoken,) = engine.generate([{"prompt_token_ids": words}], only, **given)
            assert spoken.outputs[0].token_ids == [KNOWN, KNOWN]
            assert spoken.outputs[0].text.split() == [ADDED] * 2 * (name == "sql")
    assert found["sql"].prompt_token_ids == words
    assert KNOWN not in found["base"].prompt_token_ids
    model.get_input_embeddings().weight.data[KNOWN] = row  # the head is tied, and has it too
    tokens = torch.tensor([words + found["sql"].outputs[0].token_ids])
    want = torch.log_softmax(logits_of(model, tokens)[0], -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs_of(found["sql"])), want, atol=1e-4, rtol=0)


def test_a_larger_vocabulary_is_the_base_models(tmp_path: Path) -> None:
    """A message says so; with the base model resized, such adapters are served, beside others of that size."""
    model = copy.deepcopy(transformers_model("llama-biases"))
    old = str(checkpoint("llama-biases"))
    model.resize_token_embeddings(model.config.vocab_size + 9, mean_resizing=False)
    matrices = matrices_of(model, 1)
    request = write_whole(tmp_path / "x", "llama-biases", matrices, lora_alpha=0)
    arguments: dict[str, Any] = {"dtype": "float32", **SIZES, **WHOLE}
    refused = pytest.raises(ValueError, match=r"A vocabulary of another size needs a base model of that size: resize")
    with CompiledEngine(old, **arguments) as engine, refused:
        engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
    model.save_pretrained(tmp_path / "resized")
    added = model.config.vocab_size - 1
    with CompiledEngine(str(tmp_path / "resized"), **arguments) as engine:
        prompt = {"prompt_token_ids": [*PROMPTS[0], added]}
        (output,) = engine.generate([prompt], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
    model.get_input_embeddings().weight.data = matrices[EMBEDDING]
    model.get_output_embeddings().weight.data = matrices[HEAD]
    tokens = torch.tensor([[*PROMPTS[0], added, *output.outputs[0].token_ids]])
    want = torch.log_softmax(logits_of(model, tokens)[0], -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), want, atol=1e-4, rtol=0)
