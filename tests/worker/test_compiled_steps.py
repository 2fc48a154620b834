"""CompiledSteps: what it hands to other processes to compile. The tests of engines see the rest."""

import io

from compiled_llm import CompiledEngine
from compiled_llm.compiling.messages import receive, send
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
