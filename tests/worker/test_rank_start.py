"""What processes of one model do at their start, in whose order."""

import threading
import time

from compiled_llm.ops import RankGroup
from compiled_llm.worker.rank_start import in_turns
from tests.ops.parallel.ranks import run_ranks


def test_stages_measure_one_after_the_other_and_ranks_of_a_stage_together() -> None:
    def measured(size: int, num_ranks: int) -> list[set[int]]:
        """Which stages run while each process does."""
        running, together = list[int](), [threading.Barrier(num_ranks) for _ in range(size // num_ranks)]

        def of_process(place: int, peers: RankGroup) -> set[int]:
            stage, rank = divmod(place, num_ranks)

            def measure() -> set[int]:
                running.append(stage)
                together[stage].wait(timeout=30)
                time.sleep(0.02)
                seen = set(running)
                together[stage].wait(timeout=30)
                running.remove(stage)
                return seen

            return in_turns(measure, RankGroup.of(rank, num_ranks, peers.memory), peers)

        return run_ranks(size, of_process)

    assert measured(3, 1) == [{0}, {1}, {2}]
    assert measured(4, 2) == [{0}, {0}, {1}, {1}]
    assert measured(2, 2) == [{0}, {0}]
