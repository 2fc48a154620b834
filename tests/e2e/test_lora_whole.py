"""Adapters with a head and an embedding of their own: PEFT's numbers, and the same bits in any company and order."""

import copy
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.ops.linear import packed_linear
from tests.adapters.made import linear_modules, write_adapter
from tests.compiling.test_function import check_one_graph
from tests.drawn import marked
from tests.e2e.test_lora import LORA, PARAMS, PROMPTS, SIZES, Result, logprobs_of, results
from tests.families import checkpoint, logits_of, transformers_model

WHOLE: dict[str, Any] = {**LORA, "max_loras": 3, "max_lora_modules_to_save": 1}
HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
SERVED = {
    f"{kind}, {what}": (name, which)
    for kind, name in (("tied", "qwen3"), ("apart", "llama-biases"))
    for what, which in (("both", (HEAD, EMBEDDING)), ("head", (HEAD,)), ("embedding", (EMBEDDING,)))
}


def matrices_of(model: nn.Module, seed: int, strength: float = 0.5) -> dict[str, Tensor]:
    """The model's embedding and head, each changed by itself."""
    generator = torch.Generator().manual_seed(seed)
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    changed = [
        table.data + strength * table.data.std() * torch.randn(table.shape, generator=generator) for table in tables
    ]
    return {EMBEDDING: changed[0], HEAD: changed[1]}


def write_whole(directory: Path, name: str, matrices: dict[str, Tensor], seed: int = 0, **config: Any) -> LoRARequest:
    """An adapter of ``q_proj`` and ``matrices``."""
    modules = {n: s for n, s in linear_modules(transformers_model(name)).items() if n.endswith("q_proj")}
    saved = [key.split(".")[-2] for key in matrices]
    write_adapter(directory, modules, seed=seed, modules_to_save=saved, **config)
    file = directory / "adapter_model.safetensors"
    save_file({**load_file(file), **matrices}, file)
    return LoRARequest(directory.name, str(directory))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Two with both matrices, one with a head, one with three rows, one of linear layers, and none."""
    directory, model = tmp_path_factory.mktemp("adapters"), transformers_model("qwen3")
    few = model.get_input_embeddings().weight.data.clone()
    few[[5, 7, 300]] += 0.3
    return [
        write_whole(directory / "both", "qwen3", matrices_of(model, 1), 1),
        write_whole(directory / "others", "qwen3", matrices_of(model, 2), 2),
        write_whole(directory / "head", "qwen3", {HEAD: matrices_of(model, 3)[HEAD]}, 3),
        write_whole(directory / "few", "qwen3", {EMBEDDING: few}, 4),
        None,
        write_whole(directory / "none", "qwen3", {}, 5),
    ]


TARGETS = ("all-linear", "lm_head", "embed_tokens")


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(
        str(checkpoint("qwen3")), dtype="bfloat16", **SIZES, **WHOLE, lora_target_modules=TARGETS
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> list[Result]:
    """Each request alone."""
    found = []
    for i in range(len(PROMPTS)):
        engine.reset_prefix_cache()
        found += results(engine, adapters, range(i, i + 1))
    assert len({str(tokens) for tokens, _ in found}) == len(found)
    return found


@pytest.mark.parametrize("case", marked(SERVED, ["tied, head"]))
def test_log_probabilities_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, which = SERVED[case]
    model = copy.deepcopy(transformers_model(name))
    matrices = {key: matrix for key, matrix in matrices_of(model, 1).items() if key in which}
    request = write_whole(tmp_path / "x", name, matrices, r=4, lora_alpha=0)
    if EMBEDDING in matrices:
        model.get_input_embeddings().weight = nn.Parameter(matrices[EMBEDDING])
    if HEAD in matrices:
        model.get_output_embeddings().weight = nn.Parameter(matrices[HEAD])
    with CompiledEngine(str(checkpoint(name)), dtype="float32", **SIZES, **WHOLE) as engine:
        (output,) = engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
    tokens = torch.tensor([PROMPTS[0] + output.outputs[0].token_ids])
    found = torch.tensor(logprobs_of(output))
    for one, differs in ((model, False), (transformers_model(name), True)):
        reference = torch.log_softmax(logits_of(one, tokens)[0], -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        assert ((found - reference).abs().max() > 1e-4) == differs


def test_company_changes_no_bit(
    engine: CompiledEngine, adapters: list[LoRARequest | None], expected: list[Result]
) -> None:
    """Three of them take turns in the one slot that has room for matrices; once more with all that is cached."""
    engine.reset_prefix_cache()
    for _ in range(2):
        assert results(engine, adapters) == expected


def test_heads_are_packed_where_adapters_are_read(
    engine: CompiledEngine,
    adapters: list[LoRARequest | None],
    expected: list[Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not between steps, which would wait for it: two adapters take turns in a slot, and are copied to it alone."""
    pack, threads = packed_linear.pack_words, []

    def packing(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        pack(*arguments)

    monkeypatch.setattr(packed_linear, "pack_words", packing)
    held = []
    for adapter in adapters[:2]:
        assert adapter is not None
        path = shutil.copytree(adapter.lora_path, tmp_path / adapter.lora_name)  # so it is read again
        held.append(engine.begin_reading(LoRARequest(adapter.lora_name, str(path))).result())
    engine.reset_prefix_cache()
    assert results(engine, [*held, *held], range(2)) == expected[:2]
    assert len(threads) == 2
    assert all(name.startswith("compiled_llm adapters") for name in threads), threads


@pytest.mark.parametrize(
    "changes",
    [
        {"token_bucket_sizes": (16,), "max_lora_modules_to_save": 3, "num_kv_blocks": 12},
        pytest.param(
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, marks=pytest.mark.battery
        ),
        pytest.param({"enforce_eager": False}, marks=pytest.mark.battery),
    ],
    ids=["chunks and preemption", "drafts", "compiled"],
)
def test_chunks_drafts_and_graphs_change_no_bit(
    changes: dict[str, Any], adapters: list[LoRARequest | None], expected: list[Result]
) -> None:
    arguments = {"dtype": "bfloat16", **SIZES, **WHOLE, "lora_target_modules": TARGETS, **changes}
    with CompiledEngine(str(checkpoint("qwen3")), **arguments) as engine:
        assert results(engine, adapters) == expected


@pytest.mark.battery
@pytest.mark.parametrize("quantization", ["int8", "int4_w4a8"])
def test_quantised_heads(quantization: str, adapters: list[LoRARequest | None]) -> None:
    """The adapter's own is in the model's dtype."""
    with CompiledEngine(
        str(checkpoint("qwen3")), dtype="bfloat16", **SIZES, **{**WHOLE, "quantization": quantization}
    ) as engine:
        together = results(engine, adapters, range(3))
        engine.reset_prefix_cache()
        assert results(engine, adapters, range(1)) == together[:1]


def test_memory_and_cost(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> None:
    """What the slots take is in the ledger; engines without give the bits of others."""
    plain = {"dtype": "bfloat16", **SIZES, **WHOLE, "max_lora_modules_to_save": None, "lora_target_modules": TARGETS}
    with CompiledEngine(str(checkpoint("qwen3")), **plain) as without:
        engine.reset_prefix_cache()
        some = [None, adapters[3], None, adapters[5], None, None]
        assert results(without, some) == results(engine, some)
        taken = [one.memory_report().bytes_of("adapters' slots") for one in (engine, without)]
        config = engine.model_config
        assert taken[0] - taken[1] == pytest.approx(2 * config.vocab_size * config.hidden_size * 2, rel=0.1)
        with pytest.raises(ValueError, match=r"max_lora_modules_to_save must be at least 1.* takes 137536 bytes"):
            without.generate([PROMPTS[0]], PARAMS, lora_request=adapters[0], use_tqdm=False, raise_on_error=True)
    check_one_graph(engine)


def test_scores_samples_and_grammars(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> None:
    prompt = {"prompt_token_ids": PROMPTS[0]}
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=8, logprobs=1, ignore_eos=True, allowed_token_ids=[5, 9, 11]
    )
    (sampled,) = engine.generate([prompt], params, lora_request=adapters[0], use_tqdm=False, raise_on_error=True)
    tokens = sampled.outputs[0].token_ids
    assert {*tokens} <= {5, 9, 11}
    scores = [
        engine.score([prompt], [tokens], lora_request=a, use_tqdm=False)[0].logprobs for a in [*adapters[:3], None]
    ]
    assert len({str(one) for one in scores}) == 4


@pytest.mark.parametrize(
    ("matrices", "saved", "message"),
    [
        ({HEAD: (4, 9)}, ["lm_head"], "must be .*, the base model's"),
        ({HEAD: (320, 112)}, ["lm_head"], "vocabulary of another size needs"),
        ({}, ["lm_head"], "modules_to_save, .* names modules without tensors.*lm_head"),
        ({"base_model.model.model.norm.weight": (112,)}, ["norm"], "a whole module's"),
        ({}, ["score"], "modules_to_save must have"),
        ({"base_model.model.lm_head.bias": (307,)}, ["lm_head"], "a whole module's bias"),
    ],
)
def test_others_are_refused(
    engine: CompiledEngine, matrices: dict[str, tuple[int, ...]], saved: list[str], message: str, tmp_path: Path
) -> None:
    tensors = {name: torch.ones(shape) for name, shape in matrices.items()}
    request = write_whole(tmp_path / "x", "qwen3", tensors)
    path = tmp_path / "x" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": saved}))
    with pytest.raises(ValueError, match=message):
        engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
