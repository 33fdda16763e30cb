"""The trainer class as the cluster sees it."""

import pytest

from rollhook.errors import UsageError
from rollhook_torch.trainer import TorchTrainer


def test_a_model_that_the_hub_does_not_give_is_said_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"model\.path: nobody/nothing is no directory here"):
        TorchTrainer.fetch_model("nobody/nothing")
