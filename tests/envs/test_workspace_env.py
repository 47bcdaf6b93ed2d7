"""The workspace of an episode: what agents are told, what is checked, what leaves the sandbox, what stays harmless."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.tools.sandbox_transport import Request
from recipe.sandbox.launch import LocalSandbox
from verl_dag.envs.workspace_env import Workspace, fetched_files

CONTRACT = {
    "engineer": ["X_train.pkl", "y_train.pkl", "X_test.pkl"],
    "modeler": ["model.pkl"],
    "analyst": ["submission.csv"],
}


@pytest.fixture(scope="module")
def measured() -> Iterator[LocalSandbox]:
    """Return a sandbox in which a folder can hold more than its quota."""
    local = LocalSandbox(max_concurrent=2, isolation="rlimits", accept_unsandboxed=True)
    asyncio.run(local.start())
    yield local
    local.close()


def block(code: str) -> str:
    return f"I write a program.\n```python\n{code}\n```"


def play(local, *turns: tuple[str, str], files: Any = None, folder: Path | None = None, **options):
    """Step a workspace with (agent, text) pairs; return the first observation, all later ones and all infos. Its
    session must be gone afterwards."""

    async def main():
        client = SandboxClient(local.url, token=local.token)
        env = Workspace(**{"timeout_s": 20, **options})
        sample = {"extra_info": {"files": files}} | ({"data_folder": str(folder)} if folder else {})
        try:
            seen = [await env.reset(sample, 0, client)]
            infos = []
            for agent, text in turns:
                observation, reward, done, info = await env.step(
                    ["earlier", text, "print(9)"], None, ["another", agent, "later"], agent
                )
                assert (reward, done) == (0.0, False)
                assert json.loads(json.dumps(info)) == info
                seen.append(observation)
                infos.append(info)
            return seen[0], seen[1:], infos
        finally:
            await env.close()
            await env.close()
            answer = await client.transport.send(Request("GET", "/v1/status", 5.0))
            assert json.loads(answer.body)["sessions"] == {"open": 0, "used_bytes": 0}
            await client.close()

    return asyncio.run(main())


def test_agents_hand_files_over(local):
    dump = "import pickle\nfor name in {names}: pickle.dump([1, 2, 3], open(name, 'wb'))"
    first, seen, infos = play(
        local,
        ("engineer", block(dump.format(names=["X_train.pkl", "y_train.pkl"]))),
        ("engineer", block(dump.format(names=["X_test.pkl"]))),
        ("modeler", block("import pickle\nprint(sum(pickle.load(open('X_train.pkl', 'rb'))))")),
        ("analyst", block("open('submission.csv', 'w').write('id,y\\n1,2\\n')")),
        files={"train.csv": {"content": "a,b\n1,2\n"}},
        contract=CONTRACT,
    )
    assert first == "Files: train.csv (8 bytes)"
    assert seen[0].startswith("The program of engineer ended without an error.\nFiles: ")
    assert "X_train.pkl (22 bytes)" in seen[0]
    assert seen[0].endswith("engineer must still make: X_test.pkl (there is no such regular file)")
    assert infos[0]["missing"] == ["X_test.pkl"] and not infos[0]["artifacts_ok"] and infos[0]["code_ok"]
    assert infos[0]["made"] == ["X_train.pkl", "y_train.pkl"] and "train.csv" in infos[0]["files"]
    assert infos[1]["artifacts_ok"] and infos[1]["made"] == ["X_test.pkl"] and "must still" not in seen[1]
    assert "stdout:\n6\n" in seen[2] and infos[2]["missing"] == ["model.pkl"] and infos[2]["made"] == []
    assert infos[3]["artifacts_ok"] and infos[3]["fetched"] == {"submission.csv": "id,y\n1,2\n"}
    assert [info["agent"] for info in infos] == ["engineer", "engineer", "modeler", "analyst"]
    assert [info["fetched"] for info in infos[:3]] == [{}] * 3


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("<think>```python\nprint('thought')\n```</think>" + block("print('said')"), "said\n"),
        ("```python\nprint('thought')\n```\n</think>" + block("print('said')"), "said\n"),
        (block("a = 1") + "\nand then\n" + block("print(a + 1)"), "2\n"),
        ("```\nprint('bare')\n```", "bare\n"),
        ("The output is\n```\n99\n```\n" + block("print('marked')"), "marked\n"),
        ("```py\nif True:\n    print('cut off')", "cut off\n"),
    ],
)
def test_the_program_is_what_the_answer_marks(local, text, printed):
    _, (seen,), (info,) = play(local, ("a", text))
    assert f"stdout:\n{printed}" in seen and info["code_ok"]


@pytest.mark.parametrize(
    "text", ["", "no program", "<think>" + block("open('a', 'w')"), block("  \n"), "```bash\ntouch a\n```"]
)
def test_a_text_without_a_program_changes_nothing(local, text):
    _, (seen,), (info,) = play(local, ("a", text), contract={"a": ["a"]})
    assert seen.startswith("There was no program") and info["files"] == {} and not info["code_ok"]
    assert info["missing"] == ["a"]


def test_failures_are_told(local):
    _, seen, infos = play(
        local,
        ("a", block("open('a', 'w').write('1')\nraise ValueError('wrong')")),
        ("a", block("import time; print('begun', flush=True); time.sleep(60)")),
        ("a", block("import sys; sys.exit(3)")),
        ("a", block("print('x' * 10000)")),
        timeout_s=6,
        max_output_chars=100,
    )
    assert "failed with exit code 1" in seen[0] and "wrong" in seen[0] and infos[0]["made"] == ["a"]
    assert "was stopped after 6 s" in seen[1] and "begun" in seen[1]
    assert "failed with exit code 3" in seen[2]
    assert [info["code_ok"] for info in infos] == [False, False, False, True]
    assert len(infos[3]["output"]) < 200 and "characters left out" in seen[3]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("open('a.pkl', 'w')", "it is empty"),
        ("os.mkdir('a.pkl'); open('a.pkl/b', 'w').write('1')", "there is no such regular file"),
        ("os.mkfifo('a.pkl')", "there is no such regular file"),
        ("os.symlink('/etc/passwd', 'a.pkl')", "there is no such regular file"),
        ("open('b', 'w').write('1'); os.symlink('b', 'a.pkl')", "there is no such regular file"),
        ("os.mkdir('d'); open('d/a.pkl', 'w').write('1')", "there is no such regular file"),
    ],
)
def test_only_a_regular_file_with_content_fulfils_a_contract(local, make, reason):
    for pattern in ("a.pkl", "*.pkl"):
        _, (seen,), (info,) = play(local, ("a", block(f"import os; {make}")), contract={"a": [pattern]})
        assert info["problems"] == {pattern: reason} and f"a must still make: {pattern} ({reason})" in seen


def test_patterns_fulfil_a_contract(local):
    code = (
        "import os\nos.makedirs('out/deep')\nopen('out/deep/m.joblib', 'w').write('1')\nopen('X_1.pkl', 'w').write('1')"
    )
    contract = {"a": ["X_*.pkl", "out/**/*.joblib", "**/*.npy"]}
    _, _, (info,) = play(local, ("a", block(code)), contract=contract)
    assert info["missing"] == ["**/*.npy"]


def test_checks_run_in_the_sandbox(local):
    contract = {
        "a": [
            {"file": "X.pkl", "check": "len(load(path)) == 3"},
            {"file": "*.json", "check": "json.load(open(path))['ok']"},
            {"file": "missing.csv", "check": "True"},
        ]
    }
    turns = [
        "import pickle\npickle.dump([1], open('X.pkl', 'wb'))\nopen('a.json', 'w').write('{\"ok\": true}')",
        "import pickle\npickle.dump([1, 2, 3], open('X.pkl', 'wb'))\nopen('b.json', 'w').write('{')",
        "open('b.json', 'w').write('{\"ok\": 1}')\nopen('missing.csv', 'w').write('1')",
    ]
    _, seen, infos = play(local, *[("a", block(code)) for code in turns], contract=contract)
    wrong = {"X.pkl": "`len(load(path)) == 3` does not hold", "missing.csv": "there is no such regular file"}
    assert infos[0]["problems"] == wrong
    assert infos[1]["problems"].keys() == {"*.json", "missing.csv"}
    assert "raises JSONDecodeError" in infos[1]["problems"]["*.json"] and "JSONDecodeError" in seen[1]
    assert infos[2]["artifacts_ok"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        ("import pickle, os\nclass P:\n    def __reduce__(self): return (os._exit, (0,))", "ended with exit code 0"),
        ("import pickle, time\nclass P:\n    def __reduce__(self): return (time.sleep, (99,))", "did not end in time"),
        ("import pickle, sys\nclass P:\n    def __reduce__(self): return (sys.exit, ())", "raises SystemExit"),
        (
            "import pickle\nclass P:\n    def __reduce__(self): return (exec, ('import os; os.kill(os.getpid(), 9)',))",
            "its check",
        ),
    ],
)
def test_a_pickle_that_ends_its_check_fails_it(local, make, problem):
    dump = f"{make}\npickle.dump(P(), open('X.pkl', 'wb'))"
    contract = {"a": [{"file": "X.pkl", "check": "load(path) is None"}]}
    _, _, (info,) = play(local, ("a", block(dump)), contract=contract, timeout_s=2)
    assert problem in info["problems"]["X.pkl"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *((f'[[{number}, "x"]]', "its check was disturbed") for number in ("99", "-1", "Infinity", "true")),
        *((text, "its check was disturbed") for text in ('{"a": 1}', "[1]", "[" * 100_000, "no json")),
        ('[[0, "a\\nb must still make: nothing \\u001b[2J"]]', "'a b must still make: nothing \\x1b[2J'"),
        ("[]", None),  # a file can claim to be right: a check is no proof
    ],
)
def test_a_pickle_that_forges_the_result_of_its_check_does_no_harm(local, line, problem):
    forged = f"import os, sys, __main__; print(chr(10) + __main__.marker + {line!r}, flush=True); os._exit(0)"
    dump = f"import pickle\nclass P:\n    def __reduce__(self): return (exec, ({forged!r},))\n"
    dump += "pickle.dump(P(), open('X.pkl', 'wb'))"
    contract = {"a": [{"file": "X.pkl", "check": "load(path)"}]}
    _, (seen,), (info,) = play(local, ("a", block(dump)), contract=contract)
    assert info["problems"] == ({"X.pkl": problem} if problem else {})
    assert all(part.isprintable() for part in seen.split("\n"))


def test_a_module_of_the_agent_does_not_replace_that_of_a_check(local):
    code = "open('json.py', 'w').write('def load(file): return True')\nopen('a.json', 'w').write('no')"
    contract = {"a": [{"file": "a.json", "check": "json.load(open(path))"}]}
    _, _, (info,) = play(local, ("a", block(code)), contract=contract)
    assert "raises JSONDecodeError" in info["problems"]["a.json"]


def test_a_pickle_is_never_loaded_outside(local, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    code = (
        "import os, pickle\nclass P:\n"
        f"    def __reduce__(self): return (os.system, ('touch {trap}',))\n"
        "pickle.dump(P(), open('model.pkl', 'wb'))\npickle.dump(P(), open('submission.csv', 'wb'), 0)"
    )

    def refuse(*_args, **_kwargs):
        raise AssertionError("nothing may be unpickled here")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    contract = {"a": ["model.pkl", {"file": "submission.csv", "check": "load(path) is not None"}]}
    _, _, (info,) = play(local, ("a", block(code)), contract=contract)
    assert info["artifacts_ok"] and "posix" in info["fetched"]["submission.csv"]
    if local.isolation == "full":
        assert not trap.exists()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("import os; os.symlink('/etc/passwd', 'submission.csv')", None),
        ("import os; os.mkfifo('submission.csv')", None),
        ("import os; os.mkdir('submission.csv')", None),
        ("import os; open('b', 'w').write('1'); os.link('b', 'submission.csv')", "not possible"),
        ("open('submission.csv', 'wb').truncate(60 << 20)", "may still leave the sandbox"),
        ("open('submission.csv', 'w').write('x' * 1_100_000)", "may still leave the sandbox"),
    ],
)
def test_what_is_no_small_regular_file_does_not_leave_the_sandbox(local, make, reason):
    _, (seen,), (info,) = play(local, ("a", block(make)), contract={"a": ["submission.csv"]}, fetch_mb=1)
    assert info["fetched"] == {} and info["kept"] == [] and not info["artifacts_ok"]
    assert info["refused"].keys() == ({"submission.csv"} if reason else set())
    assert (reason or "no such regular file") in info["problems"]["submission.csv"]
    assert "root:" not in seen


def test_only_new_and_changed_files_are_fetched(local):
    write = "open('{}', 'w').write('{}')"
    turns = [
        write.format("submission.csv", "1"),
        "print(1)",
        "import os\ntime = os.stat('submission.csv').st_mtime_ns\nopen('submission.csv', 'w').write('2')\n"
        "os.utime('submission.csv', ns=(time, time))",
        write.format("b.txt", "b") + "; open('c.bin', 'wb').write(b'\\xc3\\xa9\\x00')",
        "import os; os.remove('submission.csv')",
    ]
    _, _, infos = play(local, *[("a", block(code)) for code in turns], fetch=["submission.csv", "*.txt", "*.bin"])
    one, two, rest = {"submission.csv": "1"}, {"submission.csv": "2"}, {"b.txt": "b", "c.bin": "é\0"}
    assert [info["fetched"] for info in infos] == [one, {}, two, rest, {}]
    calls = [SimpleNamespace(env_info=info) for info in (infos[0], {}, *infos[1:])]
    kept = [fetched_files(SimpleNamespace(calls=calls[:count])) for count in range(len(calls) + 1)]
    assert kept == [{}, one, one, one, two, two | rest, rest]


def test_the_files_of_several_workspaces_of_an_episode_are_merged(local):
    """They take turns, and the one that is used last has no submission."""
    write = "open('{0}', 'w').write('{1}')"
    texts = [[("a.csv", "1"), ("both.csv", "2")], [("b.csv", "3"), ("both.csv", "4")]]
    played = [play(local, *[("a", block(write.format(*one))) for one in own], fetch=["*.csv"])[2] for own in texts]
    assert len({info["workspace"] for infos in played for info in infos}) == 2
    calls = [SimpleNamespace(env_info=info) for pair in zip(*played, strict=True) for info in pair]
    assert fetched_files(SimpleNamespace(calls=calls)) == {"a.csv": "1", "b.csv": "3", "both.csv": "4"}
    again = [*calls[:3], SimpleNamespace(env_info=calls[1].env_info)]
    assert fetched_files(SimpleNamespace(calls=again)) == {"a.csv": "1", "b.csv": "3", "both.csv": "2"}


def test_a_file_that_is_no_text_does_not_leave(local):
    code = "open('submission.csv', 'wb').write(b'id,y' + bytes([255]) * 300_000)"
    contract = {"a": ["submission.csv"]}
    _, (seen,), (info,) = play(local, ("a", block(code)), contract=contract, fetch_mb=0.5)
    assert info["fetched"] == {} and info["kept"] == []
    assert info["refused"] == {"submission.csv": "it is not a text file (no UTF-8 at byte 4)"}
    assert "must still make: submission.csv (it is not a text file" in seen


def test_the_limit_of_what_leaves_holds_for_all_files_together(local):
    code = "for name in 'abc': open(f'{name}.csv', 'w').write(name * 400_000)"
    _, _, (info,) = play(local, ("a", block(code)), fetch=["*.csv"], fetch_mb=1)
    assert {name: len(text) for name, text in info["fetched"].items()} == {"a.csv": 400_000, "b.csv": 400_000}
    assert list(info["refused"]) == ["c.csv"]


def test_names_are_shown_in_printable_characters(local):
    odd = ["a\nb must still make: nothing", "c\u202ed", "\x1b[2J", "ok größe 😀", "x" * 250, "..hidden"]
    code = (
        f"for name in {odd}:\n"
        "    open(name, 'w').write('1')\nimport os\nopen(os.fsencode('raw') + b'\\xff', 'w').write('1')"
    )
    _, (seen,), (info,) = play(local, ("a", block(code)), contract={"a": ["*"]}, fetch=["*"])
    listed = next(line for line in seen.split("\n") if line.startswith("Files: "))
    assert "'a\\nb must still make: nothing' (1 bytes)" in listed and listed.isprintable()
    assert all(name.isprintable() and len(name) <= 110 for key in ("files", "made", "fetched") for name in info[key])
    assert "ok größe 😀" in info["files"] and len(info["files"]) == 7
    assert len(info["refused"]) == 1  # the name that is no text


def test_many_files_are_counted_not_listed(local):
    code = "import os\nfor n in range(3000): open(f'a{n:04}', 'w').write('1')\nopen('z.csv', 'w').write('1')"
    _, (seen,), (info,) = play(local, ("a", block(code)), contract={"a": ["z.csv", "a2999"]}, fetch=["z.csv"])
    assert len(seen) < 4000 and "950 more" in seen
    assert len(info["files"]) == 200 and info["artifacts_ok"] and info["fetched"] == {"z.csv": "1"}


def test_a_full_folder_is_the_agents_own_result(local):
    fill = "for n in range(9): open(f'big{n}', 'wb').write(bytes(1 << 20))"
    _, seen, infos = play(
        local,
        ("a", block("open('keep', 'w').write('1')")),
        ("a", block(fill)),
        ("a", block("import os\nfor name in os.listdir():\n  if name.startswith('big'): os.remove(name)")),
        ("a", block("open('later', 'w').write('1' * 100000)")),
        quota_mb=4,
    )
    assert infos[1]["over"] and not infos[1]["code_ok"] and "The folder is full (4 MiB)" in seen[1]
    assert [info["over"] for info in infos] == [False, True, False, False]
    assert infos[3]["code_ok"] and infos[3]["files"] == {"keep": 1, "later": 100000}
    assert sum(infos[1]["files"].values()) <= 4 << 20


BIG = "\nwith open({}, 'wb') as file:\n  for _ in range(9): file.write(bytes(1 << 20)); file.flush()"
MANY = "for n in range(1300): open(f'f{n:04}', 'w').write('x')"
PICKLE = (
    "import pickle\nclass P:\n  def __reduce__(self): return (exec, (\"open('big', 'wb').write(bytes(9 << 20))\",))\n"
    "pickle.dump(P(), open('a.pkl', 'wb'))"
)


@pytest.mark.parametrize(
    ("fill", "removed"),
    [
        ("import os\nos.makedirs('/'.join(['d'] * 100))", "d"),
        ("import os\nos.makedirs('early/' + '/'.join(['d'] * 120))", "early/d"),
        (BIG.format("b'\\xff.bin'"), "\ufffd.bin"),
        (MANY, "f0000, f0001, f0002, 998 more"),
        (MANY + BIG.format("'zz'"), "f0000, f0001, f0002, 998 more"),
        ("open('small', 'w').write('x')" + BIG.format("'early/big'"), "early/big"),
        (PICKLE, "big"),
    ],
)
def test_no_program_locks_the_folder_for_the_next_agents(measured, fill, removed):
    _, seen, infos = play(
        measured,
        ("a", block("import os\nos.mkdir('early')\nopen('early/kept', 'w').write('1')\nopen('zzz', 'w').write('1')")),
        ("b", block(fill)),
        ("c", block("open('x', 'w').write(open('early/kept').read())")),
        contract={"b": [{"file": "*.pkl", "check": "load(path)"}]},
        quota_mb=4,
        max_listed=3,
    )
    assert [info["over"] for info in infos] == [False, True, False]
    # one name may be gone before the others: those of the largest files come first
    (told,) = [line for line in seen[1].split("\n") if line.startswith("The folder is full")]
    assert told in [f"The folder is full (4 MiB); removed: {removed.replace('998', count)}" for count in ("998", "997")]
    assert infos[2]["code_ok"] and {"early/kept": 1, "x": 1, "zzz": 1}.items() <= infos[2]["files"].items()
    assert ("small" in infos[2]["files"]) == ("small" in fill)


def test_a_sample_whose_folders_exceed_the_quota_is_one_clear_error(measured):
    with pytest.raises(UserError, match="the sample's files and their folders exceed quota_mb 1"):
        play(measured, files={"/".join("d" * 100): {"content": "x"}}, quota_mb=1)


def test_a_folder_without_room_for_further_files_is_full(local):
    if local.isolation != "full":
        pytest.skip("only a file system of its own runs out of entries")
    _, seen, infos = play(
        local,
        ("a", block(MANY)),
        ("a", block("import os\nfor name in os.listdir()[:9]: os.remove(name)")),
        quota_mb=4,
    )
    assert [info["over"] for info in infos] == [True, False]
    assert "The folder is full (4 MiB): delete files first." in seen[0] and "is full" not in seen[1]


def test_a_file_of_a_gigabyte_and_endless_ones_are_stopped(local):
    _, seen, infos = play(
        local,
        ("a", block("open('a', 'wb').truncate(1 << 30)")),
        ("a", block("file = open('b', 'wb')\nwhile True: file.write(bytes(1 << 20))")),
        quota_mb=8,
        timeout_s=30,
    )
    assert [info["code_ok"] for info in infos] == [False, False]
    assert all(size <= 8 << 20 for info in infos for size in info["files"].values())


def test_files_come_from_the_data_folder_in_each_form(local, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("a\n1\n")
    encoded = base64.b64encode(b"\x00\xff").decode()
    forms = [
        {"t/train.csv": "data/train.csv", "n.bin": {"base64": encoded}, "c": {"content": "é"}, "absent": None},
        [
            {"name": "t/train.csv", "path": "data/train.csv", "content": None},
            {"name": "n.bin", "base64": encoded},
            {"name": "c", "content": "é"},
        ],
        {"t/train.csv": str(tmp_path / "data" / "train.csv"), "n.bin": {"base64": encoded}, "c": {"content": "é"}},
    ]
    read = "import os\nprint(open('t/train.csv').read(), open('n.bin', 'rb').read(), open('c').read())"
    for files in (*forms, json.dumps(forms[0])):
        first, (seen,), _ = play(local, ("a", block(read)), files=files, folder=tmp_path)
        assert first == "Files: c (2 bytes), n.bin (2 bytes), t/train.csv (4 bytes)"
        assert "a\n1\n b'\\x00\\xff' é" in seen


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "missing.csv"}, "missing.csv.*cannot be read: No such file or directory.*relative to"),
        ({"a": "/etc/passwd"}, "outside of the folder.*set `data_root`"),
        ({"a": "../up.csv"}, "outside of the folder"),
        ({"a": "link"}, "outside of the folder"),
        ({"a": "."}, "cannot be read: Is a directory"),
        ({"/etc/passwd": {"content": "x"}}, "relative name inside the session"),
        ({"../a": {"content": "x"}}, "relative name inside the session"),
        ({"x" * 300: {"content": "x"}}, "File name too long"),
        ({"a": {"base64": "?"}}, "is not base64"),
        ({"a": {"url": "http://host"}}, "has the entry"),
        ({"a": {"content": "x", "path": "y"}}, "has the entry"),
        ({"a": 3}, "has the entry"),
        ([{"content": "x"}], "has the entry"),
        (["a"], "has the entry"),
        ("{", "is not JSON"),
        ({"a": {"content": "x" * (2 << 20)}}, "exceed quota_mb 1"),
    ],
)
def test_a_sample_with_files_that_cannot_be_is_one_clear_error(local, tmp_path, files, message):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "up.csv").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "up.csv")
    with pytest.raises(UserError, match=message) as error:
        play(local, files=files, folder=folder, quota_mb=1)
    assert "\n" not in str(error.value) and str(error.value).startswith("Workspace: ")


def test_the_data_root_takes_the_place_of_the_data_folder(local, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_text("1")
    first, _, _ = play(local, files={"a": "a"}, folder=tmp_path / "other", data_root=str(tmp_path / "root"))
    assert first == "Files: a (1 bytes)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contract": ["a.pkl"]}, "must map agents"),
        ({"contract": {"a": "a.pkl"}}, "contract.a must be a list"),
        ({"contract": {"a": [3]}}, "contract.a names 3"),
        ({"contract": {"a": [{"file": "a.pkl", "test": "1"}]}}, "contract.a names"),
        ({"contract": {"a": [{"file": "a.pkl", "check": "x ="}]}}, "check of a.pkl is no expression"),
        ({"fetch": "a.csv"}, "`fetch` must be a list"),
        ({"quota_mb": 0}, "quota_mb 0 must be above 0"),
        ({"timeout_s": -1}, "timeout_s -1 must be above 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        Workspace(**options)


def test_a_contract_with_another_agent_is_an_error():
    env = Workspace(contract={"engineer": ["a"], "modler": ["b"]})
    with pytest.raises(UserError, match="`contract` names modler; the agents of the env are engineer, modeler"):
        asyncio.run(env.reset({}, 0, None, agents=["engineer", "modeler"]))


def test_a_sandbox_that_is_down_or_full_is_a_fault():
    class Down:
        """Refuses what it is asked for after `calls` answers."""

        def __init__(self, calls: int):
            self.calls = calls

        async def open_session(self, **_options) -> str:
            return self._count("session")

        async def list(self, *_arguments) -> None:
            self._count(None)

        def _count(self, value):
            self.calls -= 1
            if self.calls < 0:
                raise SandboxFault("HTTP 504: too many sessions")
            return value

    for calls in (0, 1):
        with pytest.raises(SandboxFault) as fault:
            asyncio.run(Workspace().reset({}, 0, Down(calls)))
        assert fault.value.infra
