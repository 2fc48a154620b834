"""Engines whose weights lie in host memory give the same answers: on a CPU that is taken for a GPU, which they are for.

There a copy is done at ``fetch``, as early as on a GPU at the earliest; ``LateFetches`` does it at the latest.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.engine.preflight import look_at
from compiled_llm.models import offload
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.offload import PinnedMemory
from compiled_llm.worker import offloaded_weights
from tests.adapters.made import linear_modules, write_adapter
from tests.families import COMPILED_SIZES, EVERY_CONFIG, checkpoint, transformers_model
from tests.late_fetches import LateFetches
from tests.pretend_gpu import pretended_gpu

SIZES: dict[str, Any] = {
    "bucket_sizes": (4,), "token_bucket_sizes": (32,), "num_kv_blocks": 32, "max_model_len": 64, "progress": "off",
}  # fmt: skip
PROMPTS = [[5 * n + i for i in range(n)] for n in (1, 3, 17)]
ASKED = [
    SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=1, ignore_eos=True),
]
DRAFTER = str(DEMO_MODEL.parent / "demo_drafters" / "draft_model")
SOME = 1e-6  # GiB: of the demo model's four layers three, the least there are
battery = pytest.mark.battery
WITHOUT_NORM = ("olmo2", "olmo3")  # their layers do not begin with one


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_weights, "_DEVICES", ("cuda", "cpu"))


@pytest.fixture
def all_in_one_buffer(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer, in models of two as well; what a layer reads once the next has begun is that one's already."""
    monkeypatch.setattr(offload, "_BUFFERS", 1)
    monkeypatch.setattr(offloaded_weights, "chosen_layers", lambda weights, *_: tuple(range(len(weights.layers))))


def outputs(engine: CompiledEngine) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in engine.generate(PROMPTS, ASKED, use_tqdm=False)
    ]


@contextlib.contextmanager
def late() -> Iterator[LateFetches]:
    with LateFetches() as fetches:
        yield fetches
    assert not fetches.under_way
    assert fetches.num_not_awaited == 0
    assert fetches.num_copies > 0


def check_at_both_ends(**arguments: Any) -> None:
    arguments = {"enforce_eager": True, **SIZES, **arguments}
    gib = arguments.pop("cpu_offload_gb", SOME)
    with CompiledEngine(**arguments) as plain:
        expected = outputs(plain)
    with CompiledEngine(**arguments, cpu_offload_gb=gib) as engine:
        assert outputs(engine) == expected
        with late():
            assert outputs(engine) == expected
        assert outputs(engine) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param({"quantization": "int4"}, id="int4"),
        pytest.param({"quantization": "int8_w8a8", "cpu_offload_gb": 2.5 / 1024}, id="int8_w8a8, all layers"),
        pytest.param(
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts", marks=battery
        ),
    ],
)
def test_the_same_answers_at_both_ends(on_cpu: None, arguments: dict[str, Any]) -> None:
    check_at_both_ends(**arguments)


FAMILIES = [name for name in EVERY_CONFIG if name not in WITHOUT_NORM]
ORDINARY = {"gemma4", "deepseek-v3", "nemotron-h-moe"}


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in ORDINARY else battery) for name in FAMILIES])
def test_no_layer_of_any_family_reads_its_weights_beside_its_turn(all_in_one_buffer: None, family: str) -> None:
    check_at_both_ends(model=str(checkpoint(family)), cpu_offload_gb=1e-6)


def test_adapters_stay_on_the_device(all_in_one_buffer: None, tmp_path: Path) -> None:
    """Their slots are written to as they come."""
    model, modules = str(checkpoint("qwen3")), linear_modules(transformers_model("qwen3"))
    one = LoRARequest("one", str(write_adapter(tmp_path / "one", modules)))
    arguments: dict[str, Any] = {"enforce_eager": True, **SIZES, "model": model, "enable_lora": True}

    def answers(engine: CompiledEngine) -> list[list[int]]:
        found = engine.generate(PROMPTS, ASKED, lora_request=[None, one, one], use_tqdm=False, raise_on_error=True)
        return [output.outputs[0].token_ids for output in found]

    with CompiledEngine(**arguments) as plain:
        expected = answers(plain)
        assert expected != [answer[0] for answer in outputs(plain)]
    with CompiledEngine(**arguments, cpu_offload_gb=SOME) as engine:
        assert answers(engine) == expected
        with late():
            assert answers(engine) == expected


@battery
def test_a_draft_model_has_its_own_weights_on_the_device(on_cpu: None) -> None:
    config = {"method": "draft_model", "model": DRAFTER, "num_speculative_tokens": 2, "adaptive": False}
    check_at_both_ends(speculative_config=config)


@battery  # which compiles a step of its own
def test_a_compiled_step_has_one_graph_and_the_same_bits(on_cpu: None) -> None:
    arguments: dict[str, Any] = {"progress": "off", **COMPILED_SIZES}
    with CompiledEngine(**arguments) as plain:
        expected = outputs(plain)
    with CompiledEngine(**arguments, cpu_offload_gb=SOME) as engine:
        assert outputs(engine) == expected
        report = engine.compile_report()
    assert all((graph.graphs, graph.graph_breaks, graph.recompiles) == (1, 0, 0) for graph in report.graphs)


def test_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen layers are in pinned memory, all else on the device; the host waits for nothing but ends of steps."""
    arguments = {"enforce_eager": True, **SIZES, "dtype": "float32"}
    with CompiledEngine(device="cpu", **arguments) as engine:
        expected = [answer[0] for answer in outputs(engine)]
    with (
        pretended_gpu(monkeypatch) as gpu,
        CompiledEngine(device="cuda", cpu_offload_gb=SOME, **arguments) as engine,
    ):
        weights, ledger = engine.runner.steps.weights, engine.memory_report()
        hosts = [host for layer in weights.layers for host, _ in getattr(layer.input_norm, "begun", ())]
        assert len(hosts) == 3 * 4
        for host in hosts:
            assert host.device.type == "cpu"
            assert gpu.is_pinned(host)
        staged = [layer.mlp.gate_up.weight for layer in weights.layers]
        assert all(weight.device.type == "cuda" for weight in staged)
        assert len({weight.data_ptr() for weight in staged}) == 1 + 2, "two buffers, and the layer that stays"
        pieces = {host.untyped_storage().data_ptr(): host.untyped_storage().nbytes() for host in hosts}
        assert ledger.bytes_of("weights in host memory") == sum(pieces.values()), "what is pinned"
        assert ledger.bytes_of("buffers of these") == sum(host.nbytes for host in hosts) * 2 // 3
        gpu.serving = True
        found = [answer[0] for answer in outputs(engine)]
        gpu.serving = False
    assert found == expected


def test_the_ledger_says_what_lies_where(on_cpu: None) -> None:
    arguments = {"enforce_eager": True, **SIZES}
    with CompiledEngine(**arguments) as plain, CompiledEngine(**arguments, cpu_offload_gb=SOME) as engine:
        before, now = plain.memory_report(), engine.memory_report()
        buffers, host = now.bytes_of("buffers of these"), before.bytes_of("weights") - now.bytes_of("weights")
        assert host >= SOME * 2**30
        assert 0 < buffers < host
        assert host <= now.bytes_of("weights in host memory") < 2 * host, "whole pieces"
        assert "weights in host memory" in str(now)
        assert "weights in host memory" not in str(before)
        assert plain.runner.weight_bytes == engine.runner.weight_bytes


def test_an_engine_that_is_closed_holds_no_host_memory(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though ``engine`` is still there, for its reports."""
    made: list[weakref.ref] = []
    put = PinnedMemory.put

    def noted(memory: PinnedMemory, tensor: torch.Tensor) -> torch.Tensor:
        copy = put(memory, tensor)
        made.extend(weakref.ref(piece) for piece in memory._pieces[len(made) :])
        return copy

    monkeypatch.setattr(PinnedMemory, "put", noted)
    with CompiledEngine(enforce_eager=True, cpu_offload_gb=SOME, **SIZES) as engine:
        outputs(engine)
        assert made
        assert all(piece() is not None for piece in made)
    gc.collect()
    assert all(piece() is None for piece in made)
    assert engine.memory_report().bytes_of("weights in host memory")


def test_a_look_before_the_start_says_it_too(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(look_at(EngineConfig(cpu_offload_gb=SOME, **SIZES)))
    assert "3 layers, in host memory; they come to buffers of" in rows["offloaded weights"]
    monkeypatch.setattr(offloaded_weights, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="cpu_offload_gb must be less: 4 MiB of weights would lie in 8 MiB of"):
        list(look_at(EngineConfig(cpu_offload_gb=SOME, **SIZES)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cpu_offload_gb": -1}, "cpu_offload_gb must be"),
        ({"cuda_graphs": "trees"}, "cpu_offload_gb must be 0 with cuda_graphs='trees'"),
        ({"cuda_graphs": "programmatic"}, "cpu_offload_gb must be 0 with cuda_graphs='programmatic'"),
        ({"tensor_parallel_size": 2}, "cpu_offload_gb must be 0 with ranks and stages"),
        ({"pipeline_parallel_size": 2}, "cpu_offload_gb must be 0 with ranks and stages"),
        (
            {"speculative_config": {"method": "layer_skip", "num_speculative_tokens": 2}},
            "cpu_offload_gb must be 0 with the method 'layer_skip'",
        ),
    ],
)
def test_what_it_does_not_go_with(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**{"cpu_offload_gb": 1, **arguments})


@pytest.mark.filterwarnings("ignore:.*runs through transformers")
def test_a_cpu_and_models_without_such_layers_refuse_it(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cpu_offload_gb must be at most 0.00.* for Qwen3ForCausalLM"):
        CompiledEngine(enforce_eager=True, cpu_offload_gb=1, **SIZES)
    with pytest.raises(ValueError, match="cpu_offload_gb must be 0 for Olmo2ForCausalLM, whose layers do not begin"):
        CompiledEngine(str(checkpoint("olmo2")), enforce_eager=True, cpu_offload_gb=1e-6, **SIZES)
    with pytest.raises(ValueError, match=r"cpu_offload_gb must be 0 for .*, which runs through transformers'"):
        CompiledEngine(
            str(checkpoint("llama")), model_impl="transformers", enforce_eager=True, cpu_offload_gb=SOME, **SIZES
        )
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"cpu_offload_gb must be 0 on cpu .*weights_path maps more"):
        CompiledEngine(enforce_eager=True, cpu_offload_gb=SOME, **SIZES)
    config = EngineConfig(cpu_offload_gb=1, weights_path="w")
    assert config.weights_path == "w", "a CPU refuses the one, a GPU the other"
    assert offloaded_weights.offloaded(EngineConfig(), None, torch.device("cuda"), Dense, torch.float32) is None  # type: ignore[arg-type]
