"""BlockTables: only what changed is sent, and the device's tables are then those of the host."""

import random

import pytest
import torch

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest, WindowOutput
from compiled_llm.worker import block_tables
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.request_rows import RequestRows

LIMITS = EngineLimits(
    max_model_len=60,  # 5 rows of 15 entries: no multiple of 16 bytes
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=4,
    decode_bucket_sizes=(4,),
    token_bucket_sizes=(16,),
    chunked_prefill=True,
)


def test_tables_follow_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over requests that come, grow and go, with a window beside."""
    sent: list[int] = []
    monkeypatch.setattr(block_tables, "on_device", lambda tensor, device: sent.append(len(tensor)) or tensor)
    rng, rows = random.Random(3), RequestRows(LIMITS, 100, num_windows=1)
    tables = BlockTables(LIMITS, torch.device("cpu"), 1)
    addresses = [tensor.data_ptr() for tensor in tables.tensors]
    lengths: dict[str, int] = {}
    for step in range(60):
        gone = [name for name in lengths if rng.random() < 0.2]
        for name in gone:
            del lengths[name]
        admitted = [f"{step}"] if len(lengths) < 4 else []
        updates = []
        for name in (*lengths, *admitted):
            start, count = lengths.get(name, 0), rng.randrange(0, 3) if name in lengths else rng.randrange(1, 5)
            count = min(count, 15 - start)
            if count:
                updates.append((name, start, tuple(rng.randrange(1, 99) for _ in range(count))))
            lengths[name] = start + count
        output = SchedulerOutput(
            admissions=tuple(StartedRequest(name, SamplingParams(temperature=0), 0, (), ()) for name in admitted),
            table_updates=tuple(updates),
            released_request_ids=tuple(gone),
            windows=(WindowOutput(table_updates=tuple((n, start, (7,) * len(b)) for n, start, b in updates)),),
        )
        rows.update(output)
        if rows.changes:
            tables.send(*tables.pack(rows.changes))
        for name, length in lengths.items():
            row = rows.row_of(name)
            for table, known in zip(tables.tensors, rows.tables, strict=True):
                assert table[row, :length].tolist() == known[row, :length].tolist()
        changed = 2 * sum(len(blocks) for *_, blocks in updates)
        assert (sent.pop() if changed else 0) == 3 * changed, "12 bytes for each entry that changed"
        assert not sent
    assert [tensor.data_ptr() for tensor in tables.tensors] == addresses
    assert not any(address % 16 for address in addresses), "Inductor would copy them"
    assert all((tensor[tables.padding_row] == SINK_BLOCK).all() for tensor in tables.tensors)
