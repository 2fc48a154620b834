"""Copies of KV blocks: what is copied between device and host, and in which order."""

from compiled_llm import CompiledEngine
from compiled_llm.scheduling.scheduler_output import SchedulerOutput


def swaps(out: list[tuple[int, int]], back: list[tuple[int, int]]) -> SchedulerOutput:
    return SchedulerOutput(swapped_out=tuple(out), swapped_in=tuple(back))


def test_a_block_goes_out_before_another_takes_its_place_on_the_device_or_on_the_host() -> None:
    arguments = {"enforce_eager": True, "bucket_sizes": (1,), "max_model_len": 64, "num_kv_blocks": 4}
    with CompiledEngine(**arguments, swap_space_bytes=2**20) as engine:
        runner = engine.runner
        kv_cache, copy = runner.steps.kv_cache, runner.swap_space.copy
        groups = runner.steps.cache_groups()
        keys, last = kv_cache[0].k, runner.facts.num_swap_blocks

        def content(block: int) -> float:
            assert (keys[block] == keys[block].flatten()[0]).all()
            return keys[block].flatten()[0].item()

        keys[1], keys[2] = 1, 2
        copy(swaps(out=[(1, 1), (2, last)], back=[]), groups)
        keys[:] = 0
        copy(swaps(out=[], back=[(1, last), (2, 1)]), groups)
        assert [content(block) for block in range(5)] == [0, 2, 1, 0, 0]
        keys[3] = 3
        copy(swaps(out=[(3, last)], back=[(3, 1), (4, last)]), groups)
        assert [content(block) for block in range(5)] == [0, 2, 1, 1, 3]
