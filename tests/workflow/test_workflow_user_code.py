from __future__ import annotations

import pickle

import pytest

from recipe.dag.errors import UserError
from recipe.dag.workflow.paths import find_source, resolve_path, split_ref
from recipe.dag.workflow.user_code import load_object


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "flow.yaml").touch()
    (tmp_path / "code.py").write_text(
        "from dataclasses import dataclass\nRUNS = []\nRUNS.append(1)\n"
        "@dataclass\nclass Point:\n    x: int = 0\n    def up(self): return self.x + 1\n"
        "class Other:\n    runs = RUNS\n"
    )
    return tmp_path


def test_paths_are_looked_up_from_the_workflow_then_the_project_then_here(project, monkeypatch, tmp_path_factory):
    flow = project / "flows" / "flow.yaml"
    assert resolve_path("code.py", flow) == project / "code.py"
    assert resolve_path("code.py:Point", flow.parent) == project / "code.py"
    (flow.parent / "code.py").touch()
    assert resolve_path("code.py", flow) == flow.parent / "code.py"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "here.py").touch()
    monkeypatch.chdir(elsewhere)
    assert resolve_path("here.py", flow) == elsewhere / "here.py"
    assert resolve_path(str(elsewhere / "here.py"), flow) == elsewhere / "here.py"


def test_a_missing_file_says_where_it_was_looked_for(project):
    with pytest.raises(UserError, match=f"no such file `nope.py`; looked in {project}/flows, {project}, "):
        resolve_path("nope.py", project / "flows" / "flow.yaml")


@pytest.mark.parametrize(
    ("ref", "parts"),
    [
        ("a/b.py:C", ("a/b.py", "C")),
        ("a.py", ("a.py", None)),
        ("a.py:C.d", ("a.py", "C.d")),
        ("p.q:f", ("p.q", "f")),
        ("C:/a b.py", ("C:/a b.py", None)),
    ],
)
def test_references_are_split_at_the_object(ref, parts):
    assert split_ref(ref) == parts


def test_modules_are_found_without_being_imported(project):
    (project / "pack").mkdir()
    (project / "pack" / "__init__.py").write_text("raise RuntimeError\n")
    (project / "pack" / "mod.py").write_text("raise RuntimeError\n")
    assert find_source("pack.mod:x", project) == project / "pack" / "mod.py"
    assert find_source("pack:x", project) == project / "pack" / "__init__.py"
    assert find_source("json.decoder:x", project).name == "decoder.py"


def test_a_file_runs_once_however_it_is_named(project, monkeypatch):
    monkeypatch.chdir(project)
    other = load_object("code.py:Other", project / "flows" / "flow.yaml")
    point = load_object("../code.py:Point", project / "flows")
    module = load_object("code.py", project)
    assert module.Point is point and module.Other is other and other.runs == [1]
    assert load_object("code.py:Point.up", project)(point(4)) == 5


def test_loaded_objects_can_be_pickled(project):
    point = load_object("code.py:Point", project)(3)
    assert pickle.loads(pickle.dumps(point)) == point


def test_a_file_may_load_another(project):
    code = f"import recipe.dag.workflow.user_code as u\nPoint = u.load_object('code.py:Point', {str(project)!r})\n"
    (project / "outer.py").write_text(code)
    assert load_object("outer.py:Point", project) is load_object("code.py:Point", project)


def test_dotted_modules_are_imported():
    assert load_object("json:dumps", ".")([1]) == "[1]"
    assert load_object("os.path", ".").sep


@pytest.mark.parametrize(
    ("code", "ref", "message"),
    [
        ("x = 1", "bad.py:Hook", "bad.py: there is no `Hook` in it"),
        ("class Hooks: pass", "bad.py:Hook", "did you mean `Hooks`"),
        ("def f(:", "bad.py:f", "bad.py: cannot be loaded: SyntaxError.*line 1"),
        ("import not_there", "bad.py:f", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise ValueError('one\\ntwo')", "bad.py:f", "ValueError: one two"),
        ("raise SystemExit(3)", "bad.py:f", "SystemExit: 3"),
        ("", "no_such_module_here:f", "no_such_module_here: cannot be imported: ModuleNotFoundError"),
    ],
)
def test_failures_are_one_line_that_names_the_file(code, ref, message, tmp_path):
    (tmp_path / "bad.py").write_text(code)
    for _ in range(2):
        with pytest.raises(UserError, match=message) as caught:
            load_object(ref, tmp_path)
        assert "\n" not in str(caught.value)
