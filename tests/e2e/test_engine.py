"""CompiledEngine through its public interface, on the demo model, uncompiled so that it starts at once."""

import dataclasses
import gc
import itertools
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compiled_llm import CompiledEngine, EngineConfig, RequestOutput, SamplingParams
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.drawn import marked
from tests.families import EVERY_CONFIG, checkpoint, logits_of, transformers_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(enforce_eager=True, dtype="float32", bucket_sizes=(1, 4), check_invariants=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_left_behind(engine: CompiledEngine) -> Iterator[None]:
    yield
    assert not engine.has_unfinished_requests()
    assert engine.stats().used_blocks == 0
    assert engine.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished


def test_forms_of_a_prompt_are_one(engine: CompiledEngine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(PROMPT)
    forms = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}]
    outputs = engine.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [PROMPT, None, PROMPT, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    alone = [engine.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    assert [output.outputs[0].text for output in alone] == [output.outputs[0].text for output in outputs]


def test_outputs_in_input_order_with_paired_parameters(engine: CompiledEngine) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5, 1, 7, 3)]
    outputs = engine.generate([PROMPT] * 6, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5, 1, 7, 3]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    for output in outputs:
        m = output.metrics
        assert m.first_scheduled_time is not None
        assert m.first_token_time is not None
        assert m.finished_time is not None
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time


def test_text_is_the_decoded_tokens(engine: CompiledEngine) -> None:
    assert engine.tokenizer is not None
    (output,) = engine.generate(PROMPT, GREEDY, use_tqdm=False)
    whole = engine.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
    assert PROMPT + output.outputs[0].text == whole
    (silent,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, detokenize=False), use_tqdm=False)
    assert silent.outputs[0].text == ""
    assert silent.outputs[0].token_ids == output.outputs[0].token_ids


def test_stream_grows_to_what_generate_gives(engine: CompiledEngine) -> None:
    (whole,) = engine.generate(PROMPT, GREEDY, use_tqdm=False)
    streams = [engine.stream(PROMPT, GREEDY) for _ in range(3)]
    turns = list(zip(*streams, strict=True))  # in turns: each stream's outputs wait for it
    assert len(turns) == len(whole.outputs[0].token_ids)
    for n in range(3):
        texts = [turn[n].outputs[0].text for turn in turns]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == whole.outputs[0].text
        assert turns[-1][n].finished


def test_a_stream_beside_the_users_own_loop_loses_nobodys_outputs(engine: CompiledEngine) -> None:
    engine.add_request("mine", PROMPT, GREEDY)
    (streamed,) = [output for output in engine.stream(PROMPT, GREEDY) if output.finished]
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["mine"] * len(outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, len(outputs) + 1))
    assert outputs[-1].outputs[0].token_ids == streamed.outputs[0].token_ids


def test_a_stream_closed_early_aborts_its_request(engine: CompiledEngine) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    stream = engine.stream(PROMPT, params)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert not engine.has_unfinished_requests()
    for use in (lambda stream: None, next):  # dropped before its first output, and after
        use(engine.stream(PROMPT, params))
        gc.collect()
        assert not engine.has_unfinished_requests()


def test_a_stream_whose_request_is_aborted_ends_and_says_so(engine: CompiledEngine) -> None:
    stream = engine.stream(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    engine.abort(next(stream).request_id)
    (last,) = list(stream)
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert len(last.outputs[0].token_ids) == 1


def test_a_closed_engine_says_so() -> None:
    with CompiledEngine(enforce_eager=True, bucket_sizes=(1,)) as closed:
        stream = closed.stream(PROMPT)
        closed.close()
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]
    for use in (closed.generate, closed.stream, closed.encode_chat):
        with pytest.raises(RuntimeError, match="closed"):
            use(PROMPT)


def test_a_closed_engine_holds_no_memory_of_its_cache() -> None:
    engine = CompiledEngine(enforce_eager=True, bucket_sizes=(1,))
    engine.ask_for_memory()
    steps = engine.own_runner.steps
    steps.move_keys(SchedulerOutput(moved_keys=((16, 17),)))  # after which the caches are kept for the next moves
    held = weakref.ref(steps.kv_cache[0].k)
    engine.close()
    gc.collect()
    assert held() is None


def test_inference_mode_around_the_engine_changes_nothing(engine: CompiledEngine) -> None:
    (expected,) = engine.generate(PROMPT, GREEDY, use_tqdm=False)
    with torch.inference_mode():
        (output,) = engine.generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    with torch.inference_mode():
        started_inside = CompiledEngine(enforce_eager=True, dtype="float32", bucket_sizes=(1,))
    with started_inside:
        (output,) = started_inside.generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_add_step_abort(engine: CompiledEngine) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    engine.abort(["b", "unknown"])
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.abort("b")
    assert set(finished) == {"a", "c"}
    assert engine.step() == []


def test_the_prefix_cache_can_be_emptied_while_nothing_runs(engine: CompiledEngine) -> None:
    prompt = [7] * 40
    found = []
    for empties in (True, False, True):
        if empties:
            engine.reset_prefix_cache()
        (output,) = engine.generate(prompt, GREEDY, use_tqdm=False)
        found.append(output.num_cached_tokens)
    assert found == [0, 32, 0]
    engine.add_request("mine", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="reset_prefix_cache"):
        engine.reset_prefix_cache()
    engine.abort("mine")


def test_generate_refuses_to_lose_outputs_of_others(engine: CompiledEngine) -> None:
    engine.add_request("mine", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.generate(PROMPT, GREEDY)
    engine.abort("mine")


def test_stop_strings_and_ids(engine: CompiledEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (free,) = engine.generate(PROMPT, params, use_tqdm=False)
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (stopped,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, stop=stop), use_tqdm=False)
    completion = stopped.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: text.index(stop)]
    (stopped,) = engine.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[ids[5]]), use_tqdm=False
    )
    completion = stopped.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[5])
    assert completion.token_ids == ids[: ids.index(ids[5]) + 1]


def test_end_of_text_ends_unless_ignored(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    token = free.outputs[0].token_ids[2]
    ends_there = dataclasses.replace(engine.model_config, eos_token_ids=(token,))
    monkeypatch.setattr(engine._admission, "_model_config", ends_there)
    for ignore, reason in ((False, "stop"), (True, "length")):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=ignore)
        completion = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == (reason, None)


def test_a_model_without_a_tokenizer_takes_and_gives_ids() -> None:
    with CompiledEngine(str(checkpoint("llama")), enforce_eager=True, bucket_sizes=(2,)) as engine:
        (output,) = engine.generate([1, 2, 3], GREEDY, use_tqdm=False)
        assert output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) > 0
        for prompt, params in (("text", GREEDY), ([1, 2], SamplingParams(stop="x"))):
            with pytest.raises(ValueError, match="tokenizer"):
                engine.generate([prompt], params, use_tqdm=False, raise_on_error=True)


def test_a_request_larger_than_the_pool_is_refused_and_one_that_grows_past_it_ends() -> None:
    config = EngineConfig(model=str(checkpoint("llama")), enforce_eager=True, bucket_sizes=(2,), num_kv_blocks=2)
    with CompiledEngine.from_config(config) as engine:
        with pytest.raises(ValueError, match=r"shorter than 32 tokens \(the size of the KV pool"):
            engine.generate([[5] * 32], GREEDY, use_tqdm=False, raise_on_error=True)
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        (ended,) = engine.generate([[5] * 20], params, use_tqdm=False)
        assert (len(ended.outputs[0].token_ids), ended.outputs[0].finish_reason) == (12, "length")


# With -m battery: their caches and steps are those of another family here, and tests/models/test_forward.py compares
# their logits.
ALIKE = (
    *("llama-rope3-tied", "llama-biases", "seed-oss-tied", "ministral3", "smollm3", "granite", "qwen2", "qwen3-untied"),
    *("glm4", "glm4-moe", "qwen3-moe", "mistral4", "deepseek-v2", "deepseek-v3-halves", "gemma2", "olmo2", "olmo3"),
    *("starcoder2", "starcoder2-without-biases", "gpt-neox", "gpt-neox-in-turn", "lfm2-tied", "lfm2-moe", "qwen3.5"),
    *("granite-hybrid-moe", "nemotron-h"),
)


@pytest.mark.parametrize("name", marked(EVERY_CONFIG, set(EVERY_CONFIG) - set(ALIKE)))
def test_every_familys_greedy_tokens_equal_transformers(name: str) -> None:
    prompt, sizes = [5, 6, 7, 8, 9] * 4, {"bucket_sizes": (2,), "token_bucket_sizes": (8,), "max_model_len": 64}
    with CompiledEngine(str(checkpoint(name)), enforce_eager=True, num_kv_blocks=20, **sizes) as engine:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        (output,) = engine.generate([prompt], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits = logits_of(transformers_model(name), torch.tensor([prompt + tokens[:-1]]))  # of all steps in one
    assert tokens == logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    assert len(tokens) == 30


# The others: battery. They are in tests/models/test_published.py too, with the shapes of published models.
DUMMY = ("gpt2", "gpt-oss", "deepseek-v3", "nemotron-h-moe")


@pytest.mark.parametrize("name", marked(EVERY_CONFIG, DUMMY))
def test_dummy_weights_serve_every_family(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint(name) / "config.json").read_text())
    with CompiledEngine(str(tmp_path), load_format="dummy", enforce_eager=True, bucket_sizes=(2,)) as engine:
        outputs = engine.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 16]


def test_half_precision_serves() -> None:
    with CompiledEngine(dtype="float16", enforce_eager=True, bucket_sizes=(2,)) as engine:
        (output,) = engine.generate(PROMPT, GREEDY, use_tqdm=False)
        assert len(output.outputs[0].text) > 3


def test_weights_larger_than_the_memory_are_refused_before_they_are_made(tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    config |= {"hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 200}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the weights need \d+ MiB in float32, .* and \d+ are free on cpu"):
        CompiledEngine(str(tmp_path), load_format="dummy", device="cpu")


def test_models_that_cannot_be_had(tmp_path: Path) -> None:
    for model in (str(tmp_path / "nowhere"), "../up/too", "no-such-organisation/no-such-model"):
        with pytest.raises(ValueError, match="model="):
            CompiledEngine(model)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BloomForCausalLM"]}))
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*Supported are Llama .*LlamaForCausalLM.* Qwen3"):
        CompiledEngine(str(tmp_path))


def test_a_target_that_no_bucket_meets_is_said_and_served() -> None:
    sizes = {"bucket_sizes": (2,), "token_bucket_sizes": (16, 64), "enforce_eager": True}
    with pytest.warns(UserWarning, match=r"target_itl_ms=0.001 cannot be met beside a prompt: the fastest of"):
        engine = CompiledEngine(target_itl_ms=0.001, **sizes)
    with engine:
        assert set(engine.scheduler.costs.bucket_seconds) == {16}, "larger ones take longer"
        outputs = engine.generate([PROMPT, PROMPT * 20], GREEDY, use_tqdm=False)
        assert [output.finished for output in outputs] == [True, True]


def test_priorities_are_served_in_their_order() -> None:
    with CompiledEngine(scheduling_policy="priority", enforce_eager=True, bucket_sizes=(1,)) as engine:
        outputs = engine.generate([PROMPT] * 4, GREEDY, priority=[3, 1, 2, 0], use_tqdm=False)
        finished = [output.metrics.finished_time for output in outputs]
        assert sorted(range(4), key=lambda n: finished[n] or 0.0) == [3, 1, 2, 0]
