"""CompiledSteps: what it hands to other processes to compile. The tests of engines see the rest."""

import io
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling.build_processes import Job, receive, send
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.keys import machine_fields
from compiled_llm.compiling.parallel import build_missing
from compiled_llm.system.progress import StartProgress
from tests.families import checkpoint


def test_every_job_can_be_sent_to_another_process() -> None:
    engine = CompiledEngine(str(checkpoint("llama")), enforce_eager=True, bucket_sizes=(1, 2))
    jobs = engine.runner.steps.jobs()
    assert [job.name for job in jobs] == ["step", "sample", "sample_changed", "logprobs", "prompt_logprobs"]
    for job in jobs:
        stream = io.BytesIO()
        send(stream, job)
        assert stream.tell() < 100_000, f"{job.name} sends more than a function and the kinds of its arguments"
        stream.seek(0)
        assert callable(receive(stream).recipe())


SHARED = {"sample", "sample_changed", "logprobs"}  # of a step's logits: what they do depends on no model


def jobs_of(name: str, **arguments: Any) -> list[Job]:
    """Everything to compile for a model."""
    arguments = {"enforce_eager": True, "bucket_sizes": (1, 2), "max_model_len": 64, "num_kv_blocks": 8} | arguments
    with CompiledEngine(str(checkpoint(name)), **arguments) as engine:
        return engine.runner.steps.jobs()


def missing(jobs: list[Job], cache: CompileCache) -> set[str]:
    """Names of what would have to be compiled."""
    return set(build_missing(cache, jobs, num_workers=0, progress=StartProgress()))


OF_MODEL = {"step", "prompt_logprobs"}
EVERYTHING = SHARED | OF_MODEL


def test_what_is_compiled_again_for_another_start(tmp_path: Path) -> None:
    """After a start of one model on a CPU. Limits of the engine compile nothing again."""
    cache, jobs = CompileCache(tmp_path, machine_fields()), jobs_of("llama")
    assert missing(jobs, cache) == {job.name for job in jobs} == EVERYTHING
    for job in [*jobs, *jobs_of("llama", max_logprobs=0)]:
        cache.store(cache.key_of(job.name, job.recipe(), job.args, job.depends), b"code", {})
    again = {
        (): set(),
        ("max_model_len", 128): set(),
        ("max_num_seqs", 1): set(),
        ("bucket_sizes", (4,)): set(),
        ("token_bucket_sizes", (16, 32)): set(),
        ("num_kv_blocks", 9): set(),
        ("kv_cache_dtype", "int8"): {"step"},
        ("block_size", 8): {"step"},
        ("quantization", "int8"): OF_MODEL,
        ("max_logprobs", 5): {"logprobs", "prompt_logprobs"},
        ("dtype", "bfloat16"): EVERYTHING,
    }
    for argument, names in again.items():
        assert missing(jobs_of("llama", **dict([argument] if argument else [])), cache) == names, argument
    for name in ("mistral", "qwen2", "gpt2"):
        assert missing(jobs_of(name), cache) == OF_MODEL, name
    # A vocabulary that is small beside max_logprobs has code of its own.
    assert missing(jobs_of("llama-rope3-tied"), cache) == EVERYTHING
    assert missing(jobs_of("llama-rope3-tied", max_logprobs=0), cache) == OF_MODEL
    other = CompileCache(tmp_path, machine_fields() | {"threads": 1000})
    assert missing(jobs, other) == EVERYTHING


def test_a_miss_names_the_engine_argument_or_the_field_of_the_config(tmp_path: Path) -> None:
    cache, before = CompileCache(tmp_path, {}), {job.name: job for job in jobs_of("llama")}
    for job in before.values():
        cache.store(cache.key_of(job.name, job.recipe(), job.args, job.depends), b"code", {})

    def reasons(name: str, **arguments: Any) -> dict[str, str]:
        keys = {
            job.name: cache.key_of(job.name, job.recipe(), job.args, job.depends) for job in jobs_of(name, **arguments)
        }
        found = {name: cache.find(key) for name, key in keys.items()}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    assert reasons("llama", block_size=8) == {"step": "block_size is 8 and was 16"}
    assert reasons("llama", kv_cache_dtype="int8")["step"] == "kv_cache_dtypes is 'torch.int8' and was 'torch.float32'"
    assert reasons("mistral")["step"].startswith("model.architecture is 'MistralForCausalLM' and was 'Llama")
    other = reasons("llama-rope3-tied")
    assert other["sample"] == "vocab_size is 501 and was 307"
    assert "model.vocab_size is 501 and was 307" in other["step"]
    assert "and was" in other["prompt_logprobs"]


@pytest.mark.battery
@pytest.mark.parametrize(("name", "max_logprobs"), [("mistral", 20), ("llama-rope3-tied", 0)])
def test_a_second_model_compiles_its_own_graphs_alone_and_gives_what_it_gives_uncompiled(
    name: str, max_logprobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has another vocabulary, too."""
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    sizes: dict[str, Any] = {"bucket_sizes": (1, 2), "max_model_len": 64, "num_kv_blocks": 16, "progress": "off"}
    sizes["max_logprobs"] = max_logprobs
    with CompiledEngine(str(checkpoint("llama")), **sizes) as engine:
        assert engine.compile_report().cache_count("miss") == 5
    logprobs = {"logprobs": min(3, max_logprobs), "prompt_logprobs": min(1, max_logprobs)}
    greedy = SamplingParams(temperature=0, max_tokens=8, presence_penalty=0.5, **logprobs)
    params = [greedy, SamplingParams(temperature=1.0, seed=5, top_p=0.9, max_tokens=8, logprobs=0)]
    prompts, outputs, directory = [[5, 6, 7], [8] * 9], [], str(checkpoint(name))
    for eager in (False, True):
        with CompiledEngine(directory, **sizes, enforce_eager=eager) as engine:
            found = engine.generate(prompts, params, use_tqdm=False)
            outputs.append([(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in found])
            if not eager:
                reports = engine.compile_report().reports
                assert {report.name for report in reports if report.cache == "hit"} == SHARED
                (step,) = [report for report in reports if report.name == "step"]
                assert "model." in step.reason
    assert outputs[0] == outputs[1]
