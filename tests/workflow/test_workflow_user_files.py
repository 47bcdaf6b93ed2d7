from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.user_files import portable_ref, user_files

ROOT = Path(__file__).parents[2]
TEXT = """\
dag_id: named
agents: [{name: solver, policy: main, tools: [code_interpreter, "tools.py:Tool"]}]
policies: {main: {model: {path: m}}}
envs: {game: {path: "envs/game.py:Game"}}
nodes:
  - {id: solve, agent: solver, hooks: "hooks.py:Hooks", env: [game], env_pays: true}
  - {id: shape, reward: "recipe.dag.reward.credit:shaped", after: solve, args: {shaping: margin}}
  - {id: score, reward: pack.score:score, after: solve}
"""
FILES = {
    "hooks.py": "import json, helper\nfrom recipe.dag.types.context import Context\nclass Hooks:\n"
    "    def pre_process(self, tokenizer, prompt_ids, obs, **kwargs): return prompt_ids\n",
    "helper.py": "def ask():\n    from pack import words\n",
    "pack/__init__.py": "",
    "pack/words.py": "from . import more\n",
    "pack/more.py": "import hooks\n",
    "pack/score.py": "from .words import *\ndef score(episode): return {}\n",
    "pack/unused.py": "",
    "envs/game.py": "class Game:\n    def reset(self, sample, seed): pass\n    def step(self, actions, truth): pass\n",
    "tools.py": "class Tool:\n    schema = {}\n    async def execute(self, arguments, state): pass\n"
    "    async def close(self): pass\n",
    ".venv/lib/python3/site-packages/json.py": "",
    "pyproject.toml": "",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "flow.yaml").write_text(TEXT)
    return tmp_path


def test_the_files_of_a_workflow_are_what_it_names_and_what_they_import_of_the_project(project):
    names = ["envs/game.py", "helper.py", "hooks.py", "pack/__init__.py", "pack/more.py", "pack/score.py"]
    files = user_files(load_workflow(project / "flow.yaml"))
    assert list(files) == [*names, "pack/words.py", "tools.py"]
    assert all(path == project / name for name, path in files.items())


def test_a_file_that_cannot_be_parsed_counts_itself(project):
    (project / "helper.py").write_text("def (:")
    assert "helper.py" in user_files(load_workflow(project / "flow.yaml"))


def test_what_the_package_of_public_names_links_to_is_known_by_its_own_path():
    files = user_files(load_workflow(ROOT / "workflows" / "workflow_dsbench_tiny.yaml"))
    assert {"envs/workspace_env.py", "envs/code_env.py"} <= files.keys()
    gallery = user_files(load_workflow(ROOT / "examples" / "gallery" / "workflow_vote.yaml"))
    assert not any(name.startswith("verl_dag/") for name in [*files, *gallery])


def test_the_shipped_recipes_files_are_all_of_their_hooks_and_none_of_the_engine():
    files = user_files(load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml"))
    assert {"recipe/retool_ma/hooks.py", "recipe/retool_ma/prompts.py", "recipe/retool_ma/rewards.py"} <= files.keys()
    assert not any(name.startswith("recipe/dag/") for name in files)


@pytest.mark.parametrize(
    ("ref", "portable"),
    [
        ("hooks.py:Hooks", "hooks.py:Hooks"),
        ("./envs/game.py:Game", "envs/game.py:Game"),
        ("{project}/envs/game.py:Game", "envs/game.py:Game"),
        ("pack.score:score", "pack.score:score"),
        ("game", "game"),
        ("missing.py:Name", "missing.py:Name"),
    ],
)
def test_a_reference_does_not_depend_on_where_the_project_lies(project, ref, portable):
    assert portable_ref(ref.format(project=project), project / "flow.yaml") == portable
