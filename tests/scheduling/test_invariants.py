"""What ``check_scheduler`` sees: each planted fault is one that a bug could make."""

import pytest

from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.scheduler import Scheduler
from tests.fake_engine import FakeEngine, add, make_request, make_scheduler


def planted_order(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def planted_twin(scheduler: Scheduler) -> None:
    scheduler.waiting.add(scheduler.running[0])


def planted_leak(scheduler: Scheduler) -> None:
    scheduler.running[0].block_ids.pop()


def planted_shared_block(scheduler: Scheduler) -> None:
    a, b = scheduler.running
    scheduler.pool.share(a.block_ids[-1])
    scheduler.pool.free(b.block_ids[-1:])
    b.block_ids[-1] = a.block_ids[-1]


def planted_findable_block(scheduler: Scheduler) -> None:
    scheduler.pool.publish(scheduler.running[0].block_ids[-1], b"digest")


def planted_host_block(scheduler: Scheduler) -> None:
    scheduler.swap_pool.allocate(1)


def planted_computed_token(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed_tokens += 1


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (planted_order, "out of order"),
        (planted_twin, "two queues"),
        (planted_leak, "reference counts|have no block"),
        (planted_shared_block, "written to is shared"),
        (planted_findable_block, "not full can be found"),
        (planted_host_block, "reference counts"),
        (planted_computed_token, "no token is left"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_check_sees(plant, words: str) -> None:
    scheduler = make_scheduler(20, prefix_caching=True, num_swap_blocks=4)
    add(scheduler, make_request("a", 6, 6), make_request("b", 6, 6))
    FakeEngine(scheduler).step()
    check_scheduler(scheduler)
    plant(scheduler)
    with pytest.raises(AssertionError, match=words):
        check_scheduler(scheduler)
