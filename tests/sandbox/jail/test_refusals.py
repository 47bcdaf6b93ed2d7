"""Engines that must not, or cannot, start report the reason and the fix; there is no automatic fallback."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from recipe.sandbox import engines
from recipe.sandbox.jail import exposure, probe, routing, syscalls
from recipe.sandbox.jail.helper import Helper, NotStarted
from recipe.sandbox.outcome import Unavailable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("rlimits", False), "not a security boundary"), (("none", True), "'none' is not one of")],
)
def test_invalid_choices_are_refused(tmp_path, arguments, message):
    with pytest.raises(Unavailable, match=message):
        asyncio.run(engines.start(*arguments, root=tmp_path))


@pytest.mark.parametrize(
    ("step", "number", "remedy"),
    [
        ("making namespaces", errno.EPERM, "seccomp=unconfined"),
        ("building the root file system", errno.EPERM, "systempaths=unconfined"),
        ("making namespaces", errno.ENOSPC, "/proc/sys/user/"),
        ("building the root file system", errno.ENOSYS, "Linux 5.14"),
    ],
)
def test_refusals_of_the_kernel_are_explained(monkeypatch, step, number, remedy):
    monkeypatch.setattr(probe, "_SYSCTLS", ())
    assert remedy in probe.explain(step, "OSError: it failed", number)
    assert "it failed" in probe.explain(step, "OSError: it failed", number)


def test_a_sysctl_that_forbids_it_is_named(monkeypatch, tmp_path):
    path = tmp_path / "unprivileged_userns_clone"
    path.write_text("0\n")
    monkeypatch.setattr(probe, "_SYSCTLS", ((str(path), "0", "sysctl -w x=1"),))
    assert f"{path} is 0: run `sysctl -w x=1` as root" in probe.explain("making namespaces", "EPERM", errno.EPERM)


def test_an_engine_that_cannot_start_says_where_it_failed(tmp_path, monkeypatch):
    async def fail(self) -> None:
        raise NotStarted("making namespaces", "OSError: clone: Operation not permitted", errno.EPERM)

    monkeypatch.setattr(Helper, "start", fail)
    with pytest.raises(Unavailable, match="full isolation cannot be set up.*clone: Operation not permitted"):
        asyncio.run(engines.start("full", False, root=tmp_path))


def test_a_helper_that_dies_at_once_is_reported_with_its_last_message(tmp_path, monkeypatch):
    kind = routing.Kind("lean", frozenset(), ("xml",), ("raise SystemExit",))
    monkeypatch.setattr(routing, "KINDS", (kind,))
    with pytest.raises(Unavailable, match="loading libraries: SystemExit"):
        asyncio.run(engines.start("full", False, root=tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("MACHINE", "riscv64", "riscv64"), ("RELEASE", "5.10.0-generic", "5.14.*5.10.0-generic")],
)
def test_an_architecture_without_a_filter_and_an_old_kernel_are_refused(tmp_path, monkeypatch, name, value, message):
    monkeypatch.setattr(syscalls, name, value)
    with pytest.raises(Unavailable, match=message):
        asyncio.run(engines.start("full", False, root=tmp_path))


def test_only_the_interpreter_is_exposed(monkeypatch):
    shown = exposure.interpreter()
    for path in (sys.executable, sys.prefix, os.__file__):
        assert exposure.under(str(Path(path).resolve()), [*shown, *exposure.SYSTEM])
    assert not {"/", "/home", "/root", "/tmp", "/etc"} & set(shown)
    monkeypatch.setattr(sys, "prefix", "/etc")
    with pytest.raises(ValueError, match="virtual environment"):
        exposure.interpreter()
