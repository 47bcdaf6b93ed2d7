from __future__ import annotations

import pickle
import random
import sys

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import find_source, resolve_path, split_ref
from recipe.dag.core.user_code import load_object


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
    code = f"import recipe.dag.core.user_code as u\nPoint = u.load_object('code.py:Point', {str(project)!r})\n"
    (project / "outer.py").write_text(code)
    assert load_object("outer.py:Point", project) is load_object("code.py:Point", project)


def test_dotted_modules_are_imported():
    assert load_object("json:dumps", ".")([1]) == "[1]"
    assert load_object("os.path", ".").sep


@pytest.mark.parametrize(
    ("code", "ref", "message"),
    [
        ("x = 1", "bad.py:Hook", "bad.py: defines no `Hook`"),
        ("class Hooks: pass", "bad.py:Hook", "did you mean `Hooks`"),
        ("def f(:", "bad.py:f", "bad.py: cannot be loaded: SyntaxError.*line 1"),
        ("import not_there", "bad.py:f", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise ValueError('one\\ntwo')", "bad.py:f", "ValueError: one two"),
        ("raise SystemExit(3)", "bad.py:f", r"SystemExit: 3 \(.*bad.py:1\)"),
        ("x = 1\n\nx.y\n", "bad.py:f", r"has no attribute 'y' \(.*bad.py:3\)"),
        ("", "no_such_module_here:f", "no_such_module_here: cannot be imported: ModuleNotFoundError"),
    ],
)
def test_failures_are_one_line_that_names_the_file(code, ref, message, tmp_path):
    (tmp_path / "bad.py").write_text(code)
    for _ in range(2):
        with pytest.raises(UserError, match=message) as caught:
            load_object(ref, tmp_path)
        assert "\n" not in str(caught.value)


def folder_of(tmp_path, name: str, **files: str):
    folder = tmp_path / name
    folder.mkdir()
    for file, code in files.items():
        (folder / f"{file}.py").write_text(code)
    return folder


def test_a_file_imports_what_lies_beside_it_and_no_other_file_sees_that(tmp_path):
    """Two recipes may both have a helper.py and a prompts.py."""
    hooks = "import helper\nfrom prompts import TEXT\ndef both(): return helper.NAME, TEXT\n"
    for name in ("a", "b"):
        folder_of(tmp_path, name, hooks=hooks, helper=f"NAME = '{name}'", prompts=f"TEXT = 'prompt {name}'")
    path, known = list(sys.path), set(sys.modules)
    assert load_object("hooks.py:both", tmp_path / "a")() == ("a", "prompt a")
    assert load_object("hooks.py:both", tmp_path / "b")() == ("b", "prompt b")
    assert sys.path == path and not {"helper", "prompts"} & (set(sys.modules) - known)
    with pytest.raises(UserError, match="No module named 'helper'"):
        load_object("hooks.py:both", folder_of(tmp_path, "c", hooks=hooks))


def test_an_import_that_a_function_makes_when_it_runs_looks_beside_its_file_too(tmp_path):
    for name in ("a", "b"):
        code = "def late():\n    from helper import NAME\n    return NAME\n"
        folder_of(tmp_path, name, hooks=code, helper=f"NAME = '{name}'")
    late = {name: load_object("hooks.py:late", tmp_path / name) for name in ("a", "b")}
    assert [late[name]() for name in ("a", "b", "a")] == ["a", "b", "a"]


def test_helpers_import_each_other_and_run_once_also_where_the_workflow_names_them(tmp_path):
    folder = folder_of(
        tmp_path,
        "a",
        hooks="import helper\nimport deeper\nsame = helper.deeper is deeper\nRuns = deeper.RUNS\n",
        helper="import deeper\n",
        deeper="RUNS = []\nRUNS.append(1)\nclass Thing: pass\n",
    )
    assert load_object("hooks.py:same", folder) and load_object("hooks.py:Runs", folder) == [1]
    assert load_object("deeper.py", folder) is load_object("hooks.py:deeper", folder)
    thing = load_object("hooks.py:deeper.Thing", folder)
    assert type(pickle.loads(pickle.dumps(thing()))) is thing


def test_a_package_beside_a_file_is_imported_with_its_modules(tmp_path):
    end = "import side\nfrom kit.words import WORD\nEND = WORD + side.S\n"
    hooks = (
        "import kit.deep.end\nfrom kit import WORD, words\nfrom plain import mod\nimport plain.mod as same\n"
        "def everything(): return kit.deep.end.END, WORD, words.WORD, mod.X, same is mod\n"
    )
    for name in ("a", "b"):
        folder = folder_of(tmp_path, name, hooks=hooks, side="S = '!'\n")
        (folder / "plain").mkdir()
        folder_of(folder, "kit", __init__="from .words import WORD\n", words=f"WORD = 'word {name}'\n")
        folder_of(folder / "kit", "deep", __init__="", end=end)
        (folder / "plain" / "mod.py").write_text(f"X = 'plain {name}'\n")
    for name in ("a", "b"):
        seen = load_object("hooks.py:everything", tmp_path / name)()
        assert seen == (f"word {name}!", f"word {name}", f"word {name}", f"plain {name}", True)


def test_what_everyone_imports_is_not_loaded_a_second_time(tmp_path, monkeypatch):
    """The standard library, this project's `recipe` from beside a folder `recipe`, and a folder on sys.path."""
    folder = folder_of(
        tmp_path,
        "a",
        hooks="import random\nfrom recipe.dag.core import errors\nimport shared_helper\n",
        random="raise RuntimeError('not this one')\n",
        shared_helper="class Shared: pass\n",
    )
    (folder / "recipe").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    hooks = load_object("hooks.py", folder)
    assert hooks.random is random and hooks.errors is sys.modules["recipe.dag.core.errors"]
    assert hooks.shared_helper is sys.modules.pop("shared_helper")


def test_an_error_beside_a_file_is_reported_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folder_of(tmp_path, "a", hooks="\nimport helper\n", helper="x = 1\n\nimport not_there\n")
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            load_object("hooks.py", folder)
        text = "hooks.py: cannot be loaded: ModuleNotFoundError: No module named 'not_there' (a/helper.py:3)"
        assert str(caught.value) == text
    (folder / "helper.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"SyntaxError: .*\(a/helper.py:1\)$"):
        load_object("hooks.py", folder)
    (folder / "helper.py").write_text("REPAIRED = 'loaded again'\n")
    assert load_object("hooks.py:helper.REPAIRED", folder) == "loaded again"


def test_a_file_may_do_without_what_is_not_there(tmp_path):
    code = "try:\n    import helper\nexcept ImportError:\n    helper = None\n"
    folder = folder_of(tmp_path, "a", hooks=code, helper="import not_there")
    assert load_object("hooks.py:helper", folder) is None
