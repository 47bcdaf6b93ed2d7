"""What tests of broken and of whole workflow files share: the user's files that they name, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.dag.core.problem import Problem, WorkflowError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.schema import Workflow

FILES = {
    "hooks.py": """
import unknown_base
def pre_process(tokenizer, prompt_ids, obs, **kwargs): return prompt_ids
def note(context, *, length=3): return ""
class Base:
    def post_process(self, tokenizer, prompt_ids, response_ids, style="plain"): return response_ids
class Hook(Base):
    def pre_process(self, tokenizer, prompt_ids, obs, *, context=None, prompt=""): return prompt_ids
class Empty: pass
class PostOnly(Base): pass
class Foreign(unknown_base.Hook): pass
class Built:
    def __init__(self, size): self.size = size
    def pre_process(self, tokenizer, prompt_ids, obs): return prompt_ids
class Short:
    def pre_process(self, tokenizer, prompt_ids): return prompt_ids
class Native:
    def prompt(self, context, *, tone="plain"): return []
    async def parse(self, context, *, strict=True): return None
class Derived(Native):
    def prompt(self, context, *, tone): return []
class Bare:
    def prompt(self): return []
class Chosen:
    class Options(BaseModel):
        tone: str = "plain"
    def prompt(self, context): return []
class Mine(unknown_base.Agent):
    def parse(self, context, *, strict=True): return None
class Hungry:
    def pre_process(self, tokenizer, prompt_ids, obs, template): return prompt_ids
""",
    "env.py": """
class _Envv: pass  # private, so never suggested
class Env:
    def reset(self, sample, seed): return ""
    def step(self, actions, ground_truth): return "", 0.0, True
class Bare:
    def step(self, actions, ground_truth): return "", 0.0, True
class Sized(Env):
    def __init__(self, size): self.size = size
class ShortStep(Env):
    def step(self, actions): return "", 0.0, True
class OddReset(Env):
    def reset(self, difficulty): return ""
class Swapped(Env):
    def step(self, ground_truth, *, actions, extra=None): return "", 0.0, True
class Asking(Env):
    def reset(self, agents, sandbox): return ""
    def step(self, actions, ground_truth, agents, *, agent): return "", 0.0, True
class AskingMore(Env):
    def step(self, actions, ground_truth, agents, role): return "", 0.0, True
class Yielding(Env):
    async def step(self, actions, ground_truth):
        later = lambda: (yield)
        yield "", 0.0, True
class Later(Env):
    def step(self, actions, ground_truth):
        def each(): yield from actions
        return list(each()), 0.0, True
""",
    "rewards.py": """
def score(episode, *, weight=1.0): return {}
def nothing(): return {}
class Score: pass
""",
    "broken.py": "def f(:\n",
    "imports.py": "from rewards import score\n",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """With the files above."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


@pytest.fixture
def load_text(folder) -> Callable[..., Workflow]:
    def load(text: str, name: str = "workflow.yaml") -> Workflow:
        (folder / name).write_text(text)
        return load_workflow(folder / name)

    return load


@pytest.fixture
def problems_of(folder) -> Callable[[bytes], list[Problem]]:
    """What is wrong with a file of this content."""

    def find(content: bytes) -> list[Problem]:
        (folder / "workflow.yaml").write_bytes(content)
        with pytest.raises(WorkflowError) as caught:
            load_workflow(folder / "workflow.yaml")
        assert str(caught.value) == "\n".join(map(str, caught.value.problems))
        return caught.value.problems

    return find


@pytest.fixture
def expect_one_problem(problems_of) -> Callable[[str, tuple, str], None]:
    """Edit a good text and load it: there must be one problem, where `§` stands (it is taken out), with `message`."""

    def expect(base: str, edits: tuple[tuple[str, str], ...], message: str) -> None:
        text = base
        for old, new in edits:
            assert old in text, old
            text = text.replace(old, new, 1)
        assert text.count("§") == 1
        before, _, after = text.partition("§")
        problems = problems_of((before + after).encode())
        assert len(problems) == 1, "\n".join(map(str, problems))
        place = (before.count("\n") + 1, len(before) - before.rfind("\n"))
        assert (problems[0].line, problems[0].column) == place, str(problems[0])
        assert message in str(problems[0])

    return expect
