"""Trees of drafts in the worker."""

import torch

from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.draft_trees import move_accepted


def test_features_of_accepted_drafts_move() -> None:
    features = torch.arange(24.0).view(3, 4, 2)
    before = features.view(-1, 2).clone()
    move_accepted(SchedulerOutput(moved_keys=((7, 5), (10, 7))), [[]], features, latent=False)
    before[[5, 7]] = before[[7, 10]]
    assert torch.equal(features.view(-1, 2), before)
