"""SchedulerOutput goes to another process as it is, one day; what it counts follows from its columns."""

import pickle

import numpy as np

from compiled_llm.api.streaming import Stream
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.fake_engine import FakeEngine, FakeTrees, make_request, make_scheduler


def test_pickle_round_trip_of_steps_with_everything_in_them() -> None:
    scheduler = make_scheduler(
        8,
        prefix_caching=True,
        num_swap_blocks=20,
        arguments={"preemption_mode": "swap"},
        windows=[(5, None)],
        max_model_len=24,
    )
    for i in range(4):
        scheduler.add(make_request(f"{i}", 5, 15))
    engine = FakeEngine(scheduler)
    engine.run()
    filled = engine.outputs[0]._replace(
        masks=((0, 0, np.ones(3, dtype=np.int32)),),
        prompt_targets=((0, 0, (5,)),),
        drafts_next=True,
        known_tokens=((0, 2, (5, 6)),),
        adapter_loads=((1, "a"),),
    )
    copied = pickle.loads(pickle.dumps(filled))
    assert copied.masks[0][2].tolist() == [1, 1, 1]
    assert copied.prompt_targets == ((0, 0, (5,)),)
    assert copied.drafts_next
    assert copied.known_tokens == ((0, 2, (5, 6)),)
    assert copied.adapter_loads == ((1, "a"),)
    parent, child = make_request("parent", 6, 3), make_request("child", 6, 3)
    child.prompt_token_ids[:] = parent.prompt_token_ids
    scheduler.add(parent)
    engine.step()
    scheduler.fork(parent, child)
    engine.run()
    stream = FakeEngine(make_scheduler(8, windows=[(8, None)], stream=Stream(4, 8, 4), max_model_len=24))
    stream.scheduler.add(make_request("stream", 5, 15))
    stream.run()
    trees = FakeEngine(make_scheduler(30, source=FakeTrees(9), windows=[(5, None)]))
    trees.scheduler.add(make_request("trees", 5, 30))
    trees.run()
    outputs = engine.outputs + stream.outputs + trees.outputs
    of_the_engine = {"masks", "prompt_targets", "drafts_next", "known_tokens", "adapter_loads", "uses_adapters"}
    for field in set(SchedulerOutput._fields) - of_the_engine:
        assert any(getattr(output, field) for output in outputs), f"no step has {field}"
    for output in outputs:
        assert pickle.loads(pickle.dumps(output)) == output


def test_sizes() -> None:
    empty = SchedulerOutput()
    assert (empty.num_tokens, empty.max_query_len) == (0, 0)
    step = SchedulerOutput(("a", "b"), (1, 3), (7, 0), (1, 0), (-1, -1), (5, 6, 7, 8))
    assert (step.num_tokens, step.max_query_len) == (4, 3)
