from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from recipe.dag.train.tracking import backends_of


@pytest.mark.parametrize(
    ("given", "backends"),
    [
        ("[console]", []),
        ("[console,tensorboard,file]", ["tensorboard", "file"]),
        ("console", []),
        ("tensorboard", ["tensorboard"]),
        ("null", []),
        ("[]", []),
    ],
)
def test_the_console_is_no_tracker_and_one_name_need_not_be_a_list(given, backends):
    assert backends_of(OmegaConf.create(f"logger: {given}").logger) == backends
