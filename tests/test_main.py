"""What is refused before anything is started because workflow and configuration do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.errors import UserError
from recipe.dag.main import launch

ROOT = Path(__file__).parents[1]


def test_uncertainty_weights_need_several_episodes_per_sample(tmp_path):
    text = (ROOT / "workflows" / "workflow_no_tool.yaml").read_text()
    path = tmp_path / "unsure.yaml"
    path.write_text(text.replace("{estimator: grpo,", "{uncertainty: {}, estimator: grpo,"))
    files = [f"workflow={path}", "data.train_files=train.parquet"]
    with pytest.raises(UserError, match=r"unsure.yaml: algorithm.uncertainty compares .*rollout.n to at least 2"):
        launch("dag", [*files, "actor_rollout_ref.rollout.n=1"])
