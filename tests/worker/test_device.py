"""The number of threads: what is chosen, and that each engine computes with its own."""

from collections.abc import Iterator

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.worker import device

EAGER = {"enforce_eager": True, "num_kv_blocks": 8, "bucket_sizes": (1,), "max_model_len": 64, "progress": "off"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four cores are granted; torch uses three threads, and afterwards what it did."""
    monkeypatch.setattr(device, "granted_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torchs_number_counts_up_to_the_cores_that_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.choose_threads(None) == 3
    monkeypatch.setattr(device, "granted_cores", lambda: 2)
    assert device.choose_threads(None) == 2


def test_a_number_is_taken_up_to_the_cores_that_are_granted() -> None:
    assert [device.choose_threads(count) for count in (1, 4)] == [1, 4]
    with pytest.raises(ValueError, match=r"num_threads must be at most 4, the cores .* given 5"):
        device.choose_threads(5)


def test_engines_of_one_process_compute_with_their_own_numbers() -> None:
    with CompiledEngine(num_threads=1, **EAGER) as one, CompiledEngine(num_threads=2, **EAGER) as two:
        found, outputs = [], []
        for engine in (one, two, one):
            engine.runner.watch = lambda output, bucket, run: found.append(torch.get_num_threads()) or run()
            outputs.append(engine.generate(["Once"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
            torch.set_num_threads(3)  # the program's own number does not matter
    assert found == [1] * 4 + [2] * 4 + [1] * 4
    assert outputs[0] == outputs[1] == outputs[2]
