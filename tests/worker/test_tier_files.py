"""The key of files of blocks: whoever keeps the same of a token has the same one, in whatever number of processes."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_llm.api.config import KV_KEY_VARIABLE, EngineConfig
from compiled_llm.checkpoint.draft_model import DraftCheckpoint, draft_checkpoint
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.models.config_file import read_config
from compiled_llm.models.last_layer import LastLayer
from compiled_llm.parallel.rank_processes import RankProcesses
from compiled_llm.scheduling.worker import WorkerFacts
from compiled_llm.worker.draft_network import DraftNetwork
from compiled_llm.worker.head_stage import HeadStage
from compiled_llm.worker.started_model import StartedModel

TARGET = read_config(DEMO_MODEL)
LAYOUT = (((2, 4, 16), torch.float32),), ()  # of blocks, and of states, of which there are none
ROWS = 2


def eagle3() -> DraftCheckpoint:
    method = {"method": "eagle3", "model": str(DEMO_MODEL.with_name("demo_drafters") / "eagle3")}
    found = draft_checkpoint(EngineConfig(speculative_config=method), TARGET, None)
    assert found is not None
    return found


def of_process(drafter: DraftCheckpoint, own: LastLayer | None = None, **arguments: Any) -> bytes:
    """The key of an engine in a process by itself. ``own``: what its network computes of the model."""
    drafting = object.__new__(HeadStage)
    drafting.network = DraftNetwork(drafter.model_config, None, (), 3, 0, last_layer=own)
    assert drafting.network.taps
    started = {"model_config": TARGET, "dtype": torch.float32, "exact": "yes", "device": torch.device("cpu")}
    started |= {"_directory": DEMO_MODEL, "_drafter": drafter, "steps": SimpleNamespace(drafting=drafting)}
    pools = [torch.zeros(ROWS, 512, dtype=torch.uint8), torch.empty(0)]
    started["swap_space"] = SimpleNamespace(layout=LAYOUT, pools=pools)
    files = StartedModel._open_files(SimpleNamespace(**started), EngineConfig(**arguments))  # type: ignore[arg-type]
    files.close()
    return files.folder.key


def of_ranks(drafter: DraftCheckpoint, **arguments: Any) -> bytes:
    """That of one of two ranks."""
    config = EngineConfig(tensor_parallel_size=2, **arguments)
    facts = WorkerFacts("cpu", None, 8, 0, (), num_tier_blocks=ROWS)  # type: ignore[arg-type]
    first = {"facts": facts, "host_layout": LAYOUT, "dtype": torch.float32, "exact": "yes"}
    first |= {"device": torch.device("cpu"), "num_threads": torch.get_num_threads()}
    ranks = SimpleNamespace(ranks=[SimpleNamespace(**first)])
    rows = os.memfd_create("rows")
    RankProcesses._open_files(ranks, config, TARGET, DEMO_MODEL, drafter, rows)  # type: ignore[arg-type]
    ranks.files.close()
    assert ranks.facts.block_contents == (ranks.files.folder.key.hex(),)
    return ranks.files.folder.key


def exact_files(directory: Path) -> dict[str, Any]:
    return {"tensor_parallel_exact": True, "kv_host_bytes": 2**20, "kv_disk_path": str(directory / "kv")}


@pytest.mark.parametrize("way", ["files", "other engines"])
def test_ranks_and_one_process_with_the_same_head_have_the_same(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KV_KEY_VARIABLE, "a key that all of them share")
    arguments = exact_files(tmp_path) if way == "files" else {"role": "decode", "kv_host_bytes": 2**20}
    drafter = eagle3()
    assert of_process(drafter, **arguments) == of_ranks(drafter, **arguments)


def test_what_goes_into_the_last_layer_is_not_what_it_gives(tmp_path: Path) -> None:
    """Arguments are the same, and shapes: whether steps compute all of the last layer says what blocks have."""
    drafter, arguments = eagle3(), exact_files(tmp_path)
    keys: dict[int | None, bytes] = {None: of_process(drafter, **arguments)}
    for number in (1, 3):
        own = LastLayer(dataclasses.replace(TARGET, own_layers=(number, number + 1)), weights=None)
        keys[number] = of_process(drafter, own, **arguments)
        assert of_process(drafter, own, **arguments) == keys[number]
    assert len(set(keys.values())) == 3
