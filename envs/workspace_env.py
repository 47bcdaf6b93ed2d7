"""A working directory that all agents of an episode share, in a session of the sandbox.

Invariant: an episode has a session to itself, from `reset` to `close`. Files stay in the sandbox, except those that
`fetch` names, up to `fetch_mb`, as text; nothing is unpickled or executed outside. Only a failed sandbox raises;
whatever a program causes, a full workspace included, is in the observation. Names in observations and infos are
printable: a program can choose names with line breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from secrets import token_hex
from typing import Any

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.tools.code_interpreter import SESSION, CodeInterpreter, clip
from recipe.dag.tools.sandbox import matches
from recipe.dag.tools.sandbox_client import FileRefused, RunResult, SandboxClient, SessionFiles, SessionFull
from recipe.dag.types.record import Episode
from verl_dag.envs.code_env import NO_PROGRAM, programs_in
from verl_dag.envs.workspace_contract import Artifact, Checks, contract_of, problems_of_sizes
from verl_dag.envs.workspace_files import files_of

_NAME_CHARS = 100
_CLOSE_S = 3.0
"""How long a session's deletion may take; a server that does not answer may be starting again."""
_INFO_FILES = 200
"""Files in `info`; the rest is counted in the observation only."""


class Workspace:
    """Runs the programs of an agent's text in the episode's folder, and says which files are there.

    Options (`kwargs` of the env in the workflow):

    - contract: agent -> the files that it has to make: names, patterns (`*.pkl`), or `{file: ..., check: ...}` with an
      expression that must hold in the sandbox
    - fetch: names and patterns of the text files that leave the sandbox, for reward functions; fetch_mb: limit on all
      of them together
    - data_root: the folder below which the files of samples are; None: the folder of the data set
    - quota_mb: limit on the files of one episode
    - timeout_s, memory_mb: limits of one program and of the checks
    - max_output_chars: of stdout and stderr each; max_listed: files that an observation names
    - ttl_s: how long the folder outlives a run that is killed, if the sandbox does
    - tools: whether the tool `code_interpreter` runs in the same folder
    """

    def __init__(
        self,
        contract: Mapping[str, Sequence[Any]] | None = None,
        fetch: Sequence[str] = ("submission.csv",),
        fetch_mb: float = 4.0,
        data_root: str | None = None,
        quota_mb: int = 256,
        timeout_s: float = 60.0,
        memory_mb: int = 1024,
        max_output_chars: int = 4096,
        max_listed: int = 50,
        ttl_s: float = 300.0,
        tools: bool = True,
    ) -> None:
        self._contract = contract_of(contract or {})
        if isinstance(fetch, str) or not all(isinstance(pattern, str) and pattern for pattern in fetch):
            raise UserError(f"Workspace: `fetch` must be a list of names and patterns, not {fetch!r}")
        limits = {"fetch_mb": fetch_mb, "quota_mb": quota_mb, "timeout_s": timeout_s, "memory_mb": memory_mb}
        for name, value in (limits | {"ttl_s": ttl_s, "max_output_chars": max_output_chars}).items():
            if value <= 0:
                raise UserError(f"Workspace: {name} {value} must be above 0")
        self._fetch, self._fetch_bytes = tuple(fetch), int(fetch_mb * (1 << 20))
        self._data_root, self._quota_mb, self._ttl_s = data_root, quota_mb, ttl_s
        self._limits = {"timeout_s": timeout_s, "memory_mb": memory_mb}
        self._max_output_chars, self._max_listed = max_output_chars, max_listed
        self._shared_with_tools = tools
        self.tool_state: dict[str, dict[str, Any]] = {}
        """Read by the engine: the state of tools in this episode."""
        self._sandbox: SandboxClient | None = None
        self._opening: asyncio.Future[str] | None = None
        """Outlasts a reset that is cancelled, so that `close` knows the session."""
        self._session = ""
        self._identity = ""
        """Tells this workspace's infos from those of another one in the same episode; the session's identifier would be
        a credential."""
        self._files = SessionFiles({}, {}, 0, 0)
        self._fetched: dict[str, bytes] = {}
        """Digest of each file that was fetched in the last step."""

    async def reset(
        self, sample: dict[str, Any], seed: int, sandbox: SandboxClient, agents: Sequence[str] | None = None
    ) -> str:
        """Open the session and put the sample's files there. Raises UserError for files that are missing or do not fit,
        and for a contract with another agent than `agents`; SandboxFault."""
        if unknown := [name for name in self._contract if agents is not None and name not in agents]:
            known = ", ".join(agents or ())
            raise UserError(f"Workspace: `contract` names {', '.join(unknown)}; the agents of the env are {known}")
        self._sandbox, self._identity = sandbox, token_hex(8)
        self._opening = asyncio.ensure_future(sandbox.open_session(quota_mb=self._quota_mb, ttl_s=self._ttl_s))
        self._session = await asyncio.shield(self._opening)
        if self._shared_with_tools:
            self.tool_state = {CodeInterpreter.name: {SESSION: self._session}}
        for name, content in files_of(sample, self._data_root):
            try:
                await sandbox.put(self._session, name, content)
            except SessionFull as error:
                raise UserError(f"Workspace: the sample's files exceed quota_mb {self._quota_mb}: {error}") from None
            except FileRefused as error:
                raise UserError(f"Workspace: extra_info.files names {name[:200]!r}: {error}") from None
        self._files = await sandbox.list(self._session)
        if self._files.used_bytes > self._files.quota_bytes:  # the last file that was put may have been too much
            raise UserError(f"Workspace: the sample's files and their folders exceed quota_mb {self._quota_mb}")
        await sandbox.settle(self._session)
        return self._listing()

    async def step(
        self, actions: list[str], ground_truth: Any, agents: list[str], agent: str
    ) -> tuple[str, float, bool, dict[str, Any]]:
        """Run the program in the last action of `agent`; return (observation, 0.0, False, info). See
        `docs/environments-and-tools.md` for the keys of info. Raises SandboxFault."""
        sandbox, before = self._sandbox, self._files
        assert sandbox is not None  # the engine calls reset before step
        own = [action for name, action in zip(agents, actions, strict=True) if name == agent]
        program = "\n\n".join(programs_in(own[-1]))
        result = None
        if program:
            result = await sandbox.run_code(program, session_id=self._session, **self._limits)
        removed = [*await sandbox.settle(self._session)]
        artifacts = self._contract.get(agent, ())
        problems = await self._problems(artifacts)
        if artifacts:  # a check may run what the agent wrote, which fills the folder as a program does
            removed += await sandbox.settle(self._session)
        self._files = await sandbox.list(self._session)
        fetched, refused = await self._fetch_files()
        for name, reason in refused.items():
            problems |= {artifact.pattern: reason for artifact in artifacts if matches(name, artifact.pattern)}
        made = [name for name in self._files.sizes if _state(self._files, name) != _state(before, name)]
        output = self._output(agent, result)
        over = bool(removed) or self._files.full
        info: dict[str, Any] = {
            "agent": agent,
            "workspace": self._identity,
            "files": dict(_printable(self._files.sizes.items())),
            "made": [name for name, _ in _printable((name, 0) for name in made)],
            "missing": list(problems),
            "problems": problems,
            "over": over,
            "artifacts_ok": not problems,
            "code_ok": result is not None and result.status == "success",
            "output": output,
            "fetched": fetched,
            "kept": [_shown(name) for name in self._fetched],
            "refused": dict(_printable(refused.items())),
        }
        complaints = self._complaints(agent, problems, removed, over=over)
        return "\n".join([output, self._listing(), *complaints]), 0.0, False, info

    async def close(self) -> None:
        """Delete the session. If that fails, it ends after `ttl_s`, since it is no longer renewed."""
        opening, self._opening = self._opening, None
        if self._sandbox is None or opening is None:
            return
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            with suppress(SandboxFault, TimeoutError):
                await asyncio.wait_for(self._sandbox.delete(opening.result()), _CLOSE_S)

    async def _problems(self, artifacts: Sequence[Artifact]) -> dict[str, str]:
        """Return what is wrong with the artifacts, by pattern."""
        assert self._sandbox is not None
        if not artifacts:
            return {}
        # By pattern, since a listing of all files is cut off after 1000.
        patterns = [artifact.pattern for artifact in artifacts]
        sizes = (await self._sandbox.list(self._session, *patterns)).sizes
        problems = problems_of_sizes(artifacts, sizes)
        checks = Checks(artifacts, sizes)
        if checks.program:
            result = await self._sandbox.run_code(
                checks.program, stdin=checks.stdin, session_id=self._session, **self._limits
            )
            problems |= checks.problems(result)
        return problems

    async def _fetch_files(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the text of each file to fetch that is new or has changed, and the reasons why others are refused."""
        assert self._sandbox is not None
        found = await self._sandbox.list(self._session, *self._fetch) if self._fetch else SessionFiles({}, {}, 0, 0)
        earlier, self._fetched = self._fetched, {}
        texts, refused, room = {}, {}, self._fetch_bytes
        for name, size in found.sizes.items():
            try:
                if size > room:
                    raise FileRefused(f"it has {size} bytes; {room} may still leave the sandbox")
                content = await self._sandbox.get(self._session, name, max_bytes=room)
                text = content.decode()
            except FileRefused as error:
                refused[name] = str(error)
                continue
            except UnicodeDecodeError as error:  # replaced bytes would take three times the room
                refused[name] = f"it is not a text file (no UTF-8 at byte {error.start})"
                continue
            room -= len(content)
            self._fetched[name] = sha256(content).digest()
            if earlier.get(name) != self._fetched[name]:
                texts[_shown(name)] = text
        return texts, refused

    def _output(self, agent: str, result: RunResult | None) -> str:
        if result is None:
            return NO_PROGRAM
        ends = {
            "success": "ended without an error",
            "timeout": f"was stopped after {self._limits['timeout_s']:g} s",
            "failed": f"failed with exit code {result.return_code}",
        }
        parts = [f"The program of {agent} {ends[result.status]}."]
        for title, text in (("stdout", result.stdout), ("stderr", result.stderr)):
            if text.strip():
                parts.append(f"{title}:\n{clip(text.rstrip(), self._max_output_chars)}")
        return "\n".join(parts)

    def _listing(self) -> str:
        names = [f"{_shown(name)} ({size} bytes)" for name, size in self._files.sizes.items()]
        return f"Files: {self._names(names) or 'none'}"

    def _names(self, names: Sequence[str]) -> str:
        more = [f"{len(names) - self._max_listed} more"] if len(names) > self._max_listed else []
        return ", ".join([*names[: self._max_listed], *more])

    def _complaints(self, agent: str, problems: Mapping[str, str], removed: Sequence[str], *, over: bool) -> list[str]:
        missing = ", ".join(f"{pattern} ({reason})" for pattern, reason in problems.items())
        lines = [f"{agent} must still make: {missing}"] if missing else []
        full = f"The folder is full ({self._files.quota_bytes >> 20} MiB)"
        if removed:
            lines.append(f"{full}; removed: {self._names([_shown(name) for name in removed])}")
        elif over:
            lines.append(f"{full}: delete files first.")
        return lines


def fetched_files(episode: Episode) -> dict[str, str]:
    """Return the text of the files that left the sandbox, by name, as they were after the last step: for reward
    functions. Of several workspaces with a file of the same name, the one that was used last counts."""
    workspaces: dict[str, dict[str, str]] = {}
    for info in (call.env_info for call in episode.calls if "fetched" in call.env_info):
        texts = workspaces.pop(info["workspace"], {}) | info["fetched"]
        workspaces[info["workspace"]] = {name: texts[name] for name in info["kept"]}
    return {name: text for texts in workspaces.values() for name, text in texts.items()}


def _state(files: SessionFiles, name: str) -> tuple[int, float] | None:
    return (files.sizes[name], files.modified[name]) if name in files.sizes else None


def _printable(items: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    return [(_shown(name), value) for name, value in items][:_INFO_FILES]


def _shown(name: str) -> str:
    """Return a name in printable characters, cut off at _NAME_CHARS."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= _NAME_CHARS else text[:_NAME_CHARS] + "..."
