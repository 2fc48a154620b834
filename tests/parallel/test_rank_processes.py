"""Ranks as real processes, two of them: the outputs of one process, what they say of themselves, and faults."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.parallel import rank_processes
from compiled_llm.parallel.rank_processes import RankProcesses, check_alike
from compiled_llm.scheduling.host_blocks import MoveCosts
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.scheduling.worker import WorkerFailedError
from compiled_llm.tiers.block_file import HEADER_BYTES
from compiled_llm.worker.rank_start import Alike
from compiled_llm.worker.worker_process import Failure
from tests.forked_workers import forked_workers  # noqa: F401 - a fixture
from tests.worker import test_worker_process

ARGUMENTS = {**test_worker_process.ARGUMENTS, "dtype": "float32"}
LONG, PROMPTS = test_worker_process.LONG, test_worker_process.PROMPTS
PARAMS = [SamplingParams(temperature=0, logprobs=3, **LONG), *test_worker_process.PARAMS[1:]]
SMALL = {"enforce_eager": True, "bucket_sizes": (1,), "max_model_len": 32, "num_kv_blocks": 4, "progress": "off"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks keep blocks."""
    return tmp_path_factory.mktemp("files") / "kv"


@pytest.fixture(scope="module")
def ranks(files: Path) -> Iterator[CompiledEngine]:
    with CompiledEngine(tensor_parallel_size=2, **ARGUMENTS, kv_host_bytes=2**21, kv_disk_path=str(files)) as engine:
        yield engine


def runner_of(engine: CompiledEngine) -> RankProcesses:
    assert isinstance(engine.runner, RankProcesses)
    return engine.runner


def brief(engine: CompiledEngine) -> tuple[int, ...]:
    (out,) = engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    return tuple(out.outputs[0].token_ids)


def assert_alike(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """The same tokens, and log-probabilities within 1e-4."""
    for one, other in zip(ours, theirs, strict=True):
        pairs = [(one.prompt_logprobs, other.prompt_logprobs)]
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            pairs.append((a.logprobs, b.logprobs))
        for a, b in pairs:
            assert (a is None) == (b is None)
            for row, other_row in zip(a or [], b or [], strict=True):
                values = [{token: entry.logprob for token, entry in (part or {}).items()} for part in (row, other_row)]
                assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_the_same_outputs_as_of_one_process(ranks: CompiledEngine) -> None:
    """With prompts in chunks, preemption by swap, prefix hits, sampling, penalties, a grammar, two steps in flight."""
    with CompiledEngine(**ARGUMENTS) as engine:
        theirs = engine.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
    assert_alike(ranks.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False), theirs)
    stats = ranks.stats()
    assert stats.num_swap_preemptions > 0
    assert stats.num_swapped_in_tokens > 0
    ranks.generate(PROMPTS[1], PARAMS[1], use_tqdm=False)
    before = ranks.stats().prefix_hit_tokens
    found = ranks.generate(PROMPTS[1], PARAMS[1], use_tqdm=False)
    assert ranks.stats().prefix_hit_tokens > before
    assert_alike(found, theirs[1:2])


def test_blocks_come_from_files(ranks: CompiledEngine, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those that were computed, also where a file is damaged."""
    monkeypatch.setattr(MoveCosts, "pays", lambda *_: True)
    monkeypatch.setattr(KVTiers, "least_wait", 30.0)

    def served() -> tuple[Any, int, int]:
        """What is generated, how many tokens came from files, and how many files failed."""
        while ranks.move_blocks():
            pass
        ranks.reset_prefix_cache()
        before = ranks.stats()
        (out,) = ranks.generate(PROMPTS[2], PARAMS[0], use_tqdm=False)
        after = ranks.stats()
        hits, failures = (
            after.disk_hit_tokens - before.disk_hit_tokens,
            after.num_disk_failures - before.num_disk_failures,
        )
        return (out.outputs[0].token_ids, out.outputs[0].logprobs), hits, failures

    expected, _, _ = served()
    found, hits, failures = served()
    assert found == expected
    assert hits > 30
    assert failures == 0
    (folder,) = files.iterdir()
    assert {path.stat().st_size for path in folder.iterdir()} == {HEADER_BYTES + ranks.runner.facts.host_block_bytes}
    for number, path in enumerate(sorted(folder.iterdir())):
        if number % 3 == 0:
            path.write_bytes(path.read_bytes()[:-1])
    found, fewer, failures = served()
    assert found == expected
    assert fewer < hits
    assert failures > 0
    assert served()[:2] == (expected, hits), "what was damaged is written again"


@pytest.mark.battery
@pytest.mark.parametrize("arguments", [{}, {"tensor_parallel_exact": True}, {"kv_cache_dtype": "int8"}], ids=str)
def test_ranks_that_start_again_find_their_files(arguments: dict[str, Any], tmp_path: Path) -> None:
    """The same bits; another number of ranks finds them where the bits are the same, and else nothing."""
    work, found, hits, is_exact = (PROMPTS, PARAMS), [], [], "tensor_parallel_exact" in arguments
    for size in (2, 2, 4, 1):
        tiers = {"kv_host_bytes": 2**21, "kv_disk_path": str(tmp_path / "kv"), "tensor_parallel_size": size}
        with CompiledEngine(**ARGUMENTS, num_threads=1, **tiers, **arguments) as engine:
            outputs = engine.generate(*work, use_tqdm=False)
            hits.append(engine.stats().disk_hit_tokens)
        found.append([[(one.token_ids, one.logprobs) for one in out.outputs] for out in outputs])
    assert found[1] == found[0]
    assert (found[2] == found[3] == found[0]) is is_exact
    assert [bool(one) for one in hits] == [False, True, is_exact, is_exact]
    assert len(list((tmp_path / "kv").iterdir())) == (1 if is_exact else 3)


def test_reports_are_of_all_ranks(ranks: CompiledEngine) -> None:
    runner = runner_of(ranks)
    names = [report.name for report in ranks.compile_report().reports]
    assert {"step (rank 0)", "step (rank 1)"} <= set(names)
    ledger = ranks.memory_report()
    own = [process.memory_ledger for process in runner.ranks]
    for name in ("weights", "KV pool", "swap space"):
        assert ledger.bytes_of(name) == sum(each.bytes_of(name) for each in own)
    assert own[0].bytes_of("KV pool") * 2 == ledger.bytes_of("KV pool") == runner.kv_cache_bytes
    assert ledger.total == own[0].total
    expected = brief(ranks)
    with runner.uncompiled():
        assert brief(ranks) == expected
    assert ranks.stats().execute_seconds > 0
    assert "steps" in str(ranks.report(measure_limits=False))
    with pytest.raises(ValueError, match="profile_steps must be 0 with model_process=True or ranks"):
        ranks.reset_report(profile_steps=1)
    with pytest.raises(ValueError, match="model_process must be False and tensor_parallel_size 1 here"):
        _ = ranks.own_runner


def test_a_step_that_fails_in_all_ranks_is_an_error_and_they_go_on(ranks: CompiledEngine) -> None:
    expected, runner = brief(ranks), runner_of(ranks)
    step = runner.launch(SchedulerOutput(request_ids=("nobody",), num_scheduled_tokens=(1,), token_ids=(5,)))
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        runner.collect(step)
    assert brief(ranks) == expected


def test_ranks_have_no_file_and_cores_of_their_own(ranks: CompiledEngine) -> None:
    processes = [psutil.Process(process._process.pid) for process in runner_of(ranks).ranks]
    for process in processes:
        maps = [each.path for each in process.memory_maps() if "compiled-llm-ranks" in each.path]
        assert [path.removesuffix(" (deleted)") for path in maps] == ["/memfd:compiled-llm-ranks"]
    cores = [set(process.cpu_affinity()) for process in processes]
    if len(os.sched_getaffinity(0)) > 1:
        assert cores[0].isdisjoint(cores[1])


def outcomes(engine: CompiledEngine) -> list[str]:
    """Serve some requests; the reasons with which they end, and how the engine then answers another."""
    for number in range(3):
        engine.add_request(str(number), "abc", SamplingParams(max_tokens=20, ignore_eos=True))
    outputs: list[RequestOutput] = []

    def serve() -> None:
        while engine.has_unfinished_requests():
            outputs.extend(engine.step())

    with pytest.raises(WorkerFailedError):
        serve()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ended = [output.outputs[0] for output in outputs if output.finished]
    assert len(ended) == 3
    assert all(one.finish_reason == "error" for one in ended)
    with pytest.raises(WorkerFailedError, match="The engine serves nothing any more"):
        engine.generate("abc", use_tqdm=False)
    assert not any(psutil.pid_exists(process._process.pid) for process in runner_of(engine).ranks)
    return [str(one.stop_reason) for one in ended]


def test_requests_of_a_killed_rank_end_with_its_name_and_exit_code(ranks: CompiledEngine) -> None:
    """The last test of this engine."""
    os.kill(runner_of(ranks).ranks[1]._process.pid, signal.SIGKILL)
    (reason,) = set(outcomes(ranks))
    assert "the process of rank 1 ended with exit code -9" in reason


@pytest.mark.battery
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "HANG_SECONDS", 5.0)
    engine = CompiledEngine(tensor_parallel_size=2, **SMALL)
    os.kill(runner_of(engine).ranks[rank]._process.pid, signal.SIGSTOP)
    (reason,) = set(outcomes(engine))
    assert f"rank {rank} hangs" in reason
    engine.close()


@pytest.mark.battery
def test_a_rank_that_drifts_apart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(result: Any, drifts: bool) -> Any:
        return result._replace(digest=result.digest ^ drifts)

    engine = CompiledEngine(tensor_parallel_size=2, **SMALL)
    result = engine.runner.ranks[1].result
    monkeypatch.setattr(engine.runner.ranks[1], "result", lambda step: altered(result(step), step == 4))
    assert set(outcomes(engine)) == {
        "WorkerFailedError: rank 1 sampled other tokens than rank 0. The engine serves nothing any more"
    }
    engine.close()


@pytest.mark.battery
def test_a_rank_that_fails_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CompiledEngine(tensor_parallel_size=2, **SMALL)
    result, failure = engine.runner.ranks[1].result, Failure("MemoryError", "no room", "")
    monkeypatch.setattr(engine.runner.ranks[1], "result", lambda step: failure if step == 4 else result(step))
    assert set(outcomes(engine)) == {
        "WorkerFailedError: rank 1 failed: MemoryError: no room. The engine serves nothing any more"
    }
    engine.close()


def test_ranks_that_are_not_alike_are_refused_with_both_values() -> None:
    one = Alike("0.1", "abc", "2.13", "3.11", "avx2", "abc")
    check_alike([one, one])
    for name, value in {"package": "0.2", "source_files": "abd", "torch": "2.11", "model_files": "abd"}.items():
        other: Any = one._replace(**{name: value})
        with pytest.raises(ValueError, match=f"rank 0 has {getattr(one, name)}, rank 1 has {value}"):
            check_alike([one, other])


@pytest.mark.battery
def test_a_bad_argument_is_the_error_that_it_would_be_here() -> None:
    with pytest.raises(ValueError, match="kv_cache_memory_bytes must be from"):
        CompiledEngine(tensor_parallel_size=2, enforce_eager=True, bucket_sizes=(1,), kv_cache_memory_bytes=10)
    with pytest.raises(ValueError, match="tensor_parallel_size must divide"):
        CompiledEngine(tensor_parallel_size=3, **SMALL)
    with pytest.raises(ValueError, match="must go to another process with model_process=True, tensor_parallel_size or"):
        CompiledEngine(tensor_parallel_size=2, logits_transforms=[lambda logits: logits], **SMALL)


@pytest.mark.battery
def test_the_same_bits_of_1_2_and_4_ranks() -> None:
    found = []
    for size in (1, 2, 4):
        # The bundled model has two KV heads: of four ranks two have the same one.
        with CompiledEngine(tensor_parallel_size=size, tensor_parallel_exact=True, **ARGUMENTS) as engine:
            outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
        found.append([(out.prompt_logprobs, [(one.token_ids, one.logprobs) for one in out.outputs]) for out in outputs])
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.battery
def test_each_rank_runs_one_graph_that_the_first_has_compiled() -> None:
    sizes = {"dtype": "float32", "bucket_sizes": (1, 4), "token_bucket_sizes": (16,), "max_model_len": 96}
    with CompiledEngine(tensor_parallel_size=2, **sizes) as engine:
        theirs = CompiledEngine(enforce_eager=True, **sizes).generate(PROMPTS, PARAMS, use_tqdm=False)
        assert_alike(engine.generate(PROMPTS, PARAMS, use_tqdm=False), theirs)
        report = engine.compile_report()
    assert [process._process.exitcode for process in runner_of(engine).ranks] == [0, 0]
    assert engine.compile_report() == report, "what was known of them stays"
    with pytest.raises(WorkerFailedError, match="the processes of all ranks are closed"):
        engine.runner.launch(SchedulerOutput())
    assert len(report.reports) == report.graphs == 10
    assert report.graph_breaks == report.recompiles == 0
    assert all(one.cache == "hit" for one in report.reports if one.name.endswith("(rank 1)"))
