"""A layer of the demo model for multi-token prediction: its checkpoint says what that model says, and drafts."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import demo_mtp
from tests.demo_mtp import DEMO, DRAFTING, drawn, served


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    with demo_mtp.scripts() as found:
        yield found


@pytest.mark.battery
@pytest.mark.filterwarnings("ignore:.*the language model has no such parts")  # without drafts
def test_a_checkpoint_that_was_trained_for_a_moment_says_what_the_demo_model_says(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    _, train_heads = scripts
    budget = ["--minutes", "0.01", "--max-files", "10", "--context-length", "16"]
    train_heads.main(["mtp", *budget, "--output", str(tmp_path)])
    wanted, _ = served(DEMO, None)
    assert served(tmp_path, None)[0] == wanted
    drafted, found = served(tmp_path, DRAFTING)
    assert drafted == wanted
    assert found


def test_its_model_says_what_the_demo_model_says_and_it_drafts_what_it_drafts_in_training(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    mtp_layer, train_heads = scripts
    student, teacher = drawn(mtp_layer, tmp_path)
    tokens, found = served(tmp_path, DRAFTING, dtype="float32")
    assert tokens == served(DEMO, None, dtype="float32")[0]
    greedy = [one for one in found if one.params.temperature == 0]
    assert len({one.drafts for one in greedy}) > 4
    for one in greedy:
        ids = torch.tensor([[*one.token_ids, *one.drafts]])
        with torch.no_grad():
            logits = student.logits(teacher, ids, train_heads.taught(teacher, ids)[1])
        first = len(one.token_ids) - 2  # the row of the first draft
        assert one.drafts == tuple(int(rows[0, first + j].argmax()) for j, rows in enumerate(logits))


def test_earlier_layers_are_read_from_what_was_written(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    student, teacher = drawn(scripts[0], tmp_path)
    again = scripts[0].Mtp(teacher)
    again.go_on_from(tmp_path)
    torch.testing.assert_close(again.state_dict(), student.state_dict(), rtol=0, atol=0)


def test_without_a_folder_it_is_refused(
    scripts: tuple[ModuleType, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scripts[1].parse_args(["mtp"])
    assert "--output must be given with mtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output", str(DEMO)], "--output must be a folder, or not there yet, and not the bundled model's"),
        (["--output", "new", "--start", str(DEMO)], "--start must be a folder that train_heads.py mtp has written"),
    ],
)
def test_folders_that_it_cannot_use_are_refused_at_once(
    scripts: tuple[ModuleType, ModuleType], flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scripts[1].parse_args(["mtp", *flags])
    assert said in capsys.readouterr().err
