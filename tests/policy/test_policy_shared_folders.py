from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.policy.shared_folders import check_folders


def machines(**roots: Path) -> Callable:
    """Ask functions as machines would that see the shared folder at their own `roots`."""

    def ask(function, arguments):
        answers = {}
        for node, args in arguments.items():
            here = [
                arg.replace(str(roots["driver"]), str(roots[node])) if isinstance(arg, str) else arg for arg in args
            ]
            answers[node] = function(*here)
        return answers

    return ask


def test_a_folder_that_all_machines_see_is_made_and_left_empty(tmp_path):
    folder = tmp_path / "outputs" / "run" / "checkpoints"
    check_folders(folder, [str(tmp_path), "org/model"], ["a", "b"], machines(driver=tmp_path, a=tmp_path, b=tmp_path))
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_folder_that_one_machine_does_not_see_is_refused_and_nothing_is_left(tmp_path):
    driver, other = tmp_path / "driver", tmp_path / "other"
    for root in (driver, other):
        root.mkdir()
    folder = driver / "outputs" / "checkpoints"
    with pytest.raises(UserError, match=r"default_local_dir=.*machine b .*does not see files that are written here"):
        check_folders(folder, [], ["a", "b"], machines(driver=driver, a=driver, b=other))
    assert not list(driver.iterdir()) and not list(other.iterdir())


def test_a_folder_of_the_same_name_on_another_disk_is_refused(tmp_path):
    """The other machine's own folder takes its writes, and the driver never sees them."""
    driver, other = tmp_path / "driver", tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (driver / "checkpoints").mkdir(parents=True)

    def ask(function, arguments):
        def blind(probe, path):
            copy = other / "checkpoints" / Path(probe).name
            copy.touch()  # what the machine reads is there, as on a disk that was copied
            return function(str(copy), path.replace(str(driver), str(other)))

        return {node: blind(*args) if len(args) == 2 else "" for node, args in arguments.items()}

    with pytest.raises(UserError, match="files that it writes there are not visible here"):
        check_folders(driver / "checkpoints", [], ["a"], ask)
    assert (driver / "checkpoints").is_dir(), "it was there before"


def test_a_model_that_one_machine_does_not_have_is_refused_before_anything_is_made(tmp_path):
    driver, other = tmp_path / "driver", tmp_path / "other"
    (driver / "model").mkdir(parents=True)
    other.mkdir()

    def ask(function, arguments):
        root = {"a": driver, "b": other}
        swap = {
            node: [path.replace(str(driver), str(root[node])) for path in args[0]] for node, args in arguments.items()
        }
        return {node: function(folders) for node, folders in swap.items()}

    with pytest.raises(UserError, match="model: not on the machine b of the joined Ray"):
        check_folders(driver / "outputs", [str(driver / "model")], ["a", "b"], ask)
    assert not (driver / "outputs").exists()


def test_a_ray_of_the_runs_own_is_not_asked(tmp_path):
    check_folders(tmp_path / "new", ["/absent"], [], machines())
    assert not (tmp_path / "new").exists()
