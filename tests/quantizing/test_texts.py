"""The windows of a text, and what of the standard library the demo model learned from."""

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.models.config_file import read_config
from compiled_llm.quantizing.texts import Text, cut_windows, split_files
from compiled_llm.text.tokenizer import Tokenizer


def test_windows_predict_every_token_once() -> None:
    documents = [list(range(100, 121)), [7], [], list(range(50, 53))]
    windows = cut_windows(documents, 8, None, torch.device("cpu"))
    assert [len(window.token_ids) for window in windows] == [8, 8, 4, 2]
    assert [token for window in windows for token in window.targets.tolist()] == [*range(101, 121), 51, 52]
    assert all(torch.equal(window.targets, window.token_ids + 1) for window in windows)
    assert [len(w.token_ids) for w in cut_windows(documents, 8, 11, torch.device("cpu"))] == [8, 3]
    with pytest.raises(ValueError, match="two tokens"):
        cut_windows([[1], []], 8, None, torch.device("cpu"))


@pytest.mark.parametrize("before", [[1], [1, 2]])
def test_each_window_begins_with_what_is_put_before_a_text(before: list[int]) -> None:
    documents = [list(range(100, 121)), [], [7], list(range(50, 53))]
    windows = cut_windows(documents, 8, None, torch.device("cpu"), before)
    assert all(window.token_ids[: len(before)].tolist() == before for window in windows)
    assert max(len(window.token_ids) for window in windows) == 8
    predicted = [token for window in windows for token in window.targets[window.first :].tolist()]
    assert predicted == [*range(100, 121), 7, 50, 51, 52]
    assert all(torch.equal(window.targets[:-1], window.token_ids[1:]) for window in windows)
    few = cut_windows(documents, 8, 11, torch.device("cpu"), before)
    assert sum(len(window.targets) - window.first for window in few) == 11
    shortest = cut_windows(documents, len(before), None, torch.device("cpu"), before)
    assert [window.targets[window.first :].tolist() for window in shortest] == [[token] for token in predicted]
    with pytest.raises(ValueError, match="one token"):
        cut_windows([[]], 8, None, torch.device("cpu"), before)


@pytest.mark.parametrize("before", [[], [1, 2]])
def test_a_window_that_predicts_nothing_is_refused(before: list[int]) -> None:
    with pytest.raises(AssertionError):
        cut_windows([[5, 6, 7]], max(0, len(before) - 1), None, torch.device("cpu"), before)


@pytest.mark.parametrize("prefix", [[], [5]])
def test_as_many_tokens_of_short_documents_as_are_asked_for(prefix: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(Tokenizer, "prefix_ids", prefix)
    monkeypatch.setattr(Text, "read", lambda self: ["", *(["abc"] * 10)])
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: read.append(text) or [*prefix, *map(ord, text)])
    windows = Text(None, 12, 16).windows(EngineConfig(), read_config(DEMO_MODEL), torch.device("cpu"))
    assert sum(len(window.targets) - window.first for window in windows) == 12
    assert len(read) == 1 + (4 if prefix else 6)  # and no more is read than that takes


def test_windows_of_a_model_begin_as_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, config = EngineConfig(), read_config(DEMO_MODEL)
    monkeypatch.setattr(Tokenizer, "prefix_ids", [5])
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [5, *self.encode_piece(text)])
    windows = Text(None, 40, 16).windows(engine, config, torch.device("cpu"), next_inside=True)
    assert [window.token_ids[0].item() for window in windows] == [5, 5, 5]
    assert [len(window.token_ids) for window in windows] == [15, 15, 10]
    with pytest.raises(ValueError, match="--window must be at least 2"):
        Text(None, 40, 1).windows(engine, config, torch.device("cpu"), next_inside=True)


def test_a_file_keeps_its_side_of_the_split() -> None:
    files = {f"package/module_{i}.py": "" for i in range(500)}
    train, held_out = split_files(files)
    assert train.keys() | held_out.keys() == files.keys()
    assert not train.keys() & held_out.keys()
    assert split_files(dict(list(files.items())[:100]))[1].keys() <= held_out.keys()
