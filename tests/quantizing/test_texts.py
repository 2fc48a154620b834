"""The windows of a text, and what of the standard library the demo model learned from."""

import pytest
import torch

from compiled_llm.quantizing.texts import cut_windows, split_files


def test_windows_predict_every_token_once() -> None:
    documents = [list(range(100, 121)), [7], [], list(range(50, 53))]
    windows = cut_windows(documents, 8, None, torch.device("cpu"))
    assert [len(window.token_ids) for window in windows] == [8, 8, 4, 2]
    assert [token for window in windows for token in window.targets.tolist()] == [*range(101, 121), 51, 52]
    assert all(torch.equal(window.targets, window.token_ids + 1) for window in windows)
    assert [len(w.token_ids) for w in cut_windows(documents, 8, 11, torch.device("cpu"))] == [8, 3]
    with pytest.raises(ValueError, match="two tokens"):
        cut_windows([[1], []], 8, None, torch.device("cpu"))


def test_a_file_keeps_its_side_of_the_split() -> None:
    files = {f"package/module_{i}.py": "" for i in range(500)}
    train, held_out = split_files(files)
    assert train.keys() | held_out.keys() == files.keys()
    assert not train.keys() & held_out.keys()
    assert split_files(dict(list(files.items())[:100]))[1].keys() <= held_out.keys()
