"""A Python that starts in tenths of a second what takes ten seconds to import: a process that has imported torch and
transformers forks a child for each program of the project, each worker of Ray or torchrun, and each process that runs
tests.

    zygote = Zygote(folder)
    subprocess.run([zygote.python, "-m", "recipe.dag.main", ...])

Invariant: the child has the caller's arguments, environment, folder, standard streams and limit on the size of files,
gets its signals, ends with the program's exit code, and ends when the caller does. It is in a session of its own. Other
programs run in the ordinary Python. All processes that run tests share one such Python and its Ray; both end with the
process that made their folder.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib.util
import json
import os
import random
import resource
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch", "torch.distributed.fsdp", "torch._dynamo", "transformers.modeling_utils", "transformers.trainer")
IMPORTED += ("transformers.models.qwen2.modeling_qwen2", "tensordict", "math_verify", "numpy")
IMPORTED += ("matplotlib.pyplot", "mpl_toolkits.mplot3d", "fastapi", "uvicorn", "zmq", "google.protobuf.message")
IMPORTED += ("opentelemetry.metrics", "jsonschema", "requests", "pandas", "pyarrow.parquet", "hydra")
IMPORTED += ("prometheus_client",)
"""What takes longest. Not Ray, nor what imports it: its processes read their environment when they import it."""
OF_DRIVERS = ("recipe.dag.app.evaluate", "recipe.dag.train.local_policies", "recipe.dag.train.trainer")
"""What a second process imports, which has Ray and forks the drivers of runs."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLIENT = """\
#!{python} -SsE
import array, json, os, signal, socket, sys
arguments = sys.argv[1:]
script = next((argument for argument in arguments if argument == "-m" or not argument.startswith("-")), "")
if script.endswith("/setup_worker.py"):  # it imports Ray to set variables and to start the worker's own Python
    options = dict(argument.split("=", 1) for argument in arguments if argument.startswith(("--serial", "--language=")))
    context = json.loads(options.get("--serialized-runtime-env-context") or "{{}}")
    if not context.get("command_prefix"):
        os.environ.update(context.get("env_vars") or {{}})
        rest = arguments[arguments.index(script) + 1 :]
        arguments = [argument for argument in rest if argument.split("=", 1)[0] not in options]
        script = arguments[0]
if "-c" in arguments[:2]:
    ours = script.endswith("exec(eval(sys.stdin.readline()))")  # execnet's: a process that will run tests
elif script == "-m":
    ours = arguments[arguments.index("-m") + 1].startswith(("recipe.", "preprocess.", "ray.", "torch.distributed.run"))
else:
    ours = script.endswith("/default_worker.py") or os.path.realpath(script).startswith({root!r})
if not ours:
    os.execv({python!r}, [{python!r}, *arguments])
drives = script == "-m" and arguments[arguments.index("-m") + 1] in ("recipe.dag.main", "recipe.dag.cli")
server = socket.socket(socket.AF_UNIX)
server.connect({address!r} + ".drivers" * drives)
request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
server.sendmsg([len(request).to_bytes(8, "big")], [streams])
server.sendall(request)
answers = server.makefile()
child = int(answers.readline())
def forward(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:  # its exit code is on the way
        pass
for number in {signals!r}:
    signal.signal(number, forward)
for fd in (0, 1, 2):
    os.close(fd)
code = int(answers.readline() or -9)
if code < 0:
    if code != -9:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def hold_port() -> socket.socket:
    """Return a socket that is bound to a free port of 127.0.0.1 and refuses connections. A server that reuses addresses
    can listen there beside it; no other process gets the port while it is open."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Zygote:
    """The forking process, started by the first that asks for it. Its folder looks like a virtual environment, the one
    of this process, with `python`."""

    def __init__(self, folder: Path, owner: int):
        """`folder` has a short path, because sockets are made in it; `owner`: the process at whose end all ends."""
        self.folder, self.python = folder, folder / "bin" / "python"
        with FileLock(folder / "lock"):
            if not self.python.exists():
                self._make()
                self._start(owner)

    def _make(self) -> None:
        self.python.parent.mkdir()
        for name in ("children", "spent"):
            (self.folder / name).mkdir()
        prefix = Path(sys.prefix)
        for path in (*prefix.glob(".verl-dag-*"), prefix / "lib", *(prefix / "bin").iterdir()):
            link = self.folder / path.relative_to(prefix)
            if not link.name.startswith(("python", "verl-dag")):
                link.symlink_to(path)
        (self.python.parent / "verl-dag").write_text(f'#!/bin/sh\nexec {self.python} -m recipe.dag.cli "$@"\n')
        (self.python.parent / "verl-dag").chmod(0o755)
        signals = tuple(map(int, FORWARDED))
        text = CLIENT.format(
            python=sys.executable, address=f"{self.folder}/socket", signals=signals, root=f"{ROOT}{os.sep}"
        )
        self.python.write_text(text)
        self.python.chmod(0o755)

    def _start(self, owner: int) -> None:
        command = [sys.executable, __file__, str(self.folder), str(owner)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def child_of(self, caller: int) -> int:
        """Return the process that runs the program of a `python` that was started as the process `caller`."""
        path, deadline = self.folder / "children" / str(caller), time.monotonic() + 120
        while not path.is_file():
            assert time.monotonic() < deadline, f"{caller} has not asked for a child"
            time.sleep(0.01)
        return int(path.read_text())

    def joined_ray(self, **env: str) -> str:
        """Return the address of the one Ray that all share, with room for several runs."""
        with FileLock(self.folder / "ray.lock"):
            if not (address := self.folder / "ray.address").exists():
                with hold_port() as held:
                    command, where = self._ray_command(16, str(self.folder / "ray"), held)
                    with open(self.folder / "ray.log", "w") as log:
                        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log)
                    _wait_for_ray(self.folder / "ray.log")
                address.write_text(where)
            return address.read_text()

    @contextlib.contextmanager
    def ray(self, cwd: Path, processors: int, **env: str) -> Iterator[str]:
        """Start a Ray of one's own whose workers are forked, and yield its address."""
        scratch = tempfile.mkdtemp(prefix="ray")  # short, because sockets are made in it
        try:
            with hold_port() as held:
                command, address = self._ray_command(processors, scratch, held)
                with self._node(command, Path(scratch) / "log", cwd, env):
                    yield address
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextlib.contextmanager
    def second_node(self, address: str, cwd: Path, processors: int, **env: str) -> Iterator[int]:
        """Add a machine to the Ray at `address`, and yield the process whose end is that of the machine."""
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
        with self._node([*command, f"--num-cpus={processors}"], cwd / "second.log", cwd, env) as node:
            yield self.child_of(node)

    @contextlib.contextmanager
    def _node(self, command: list[str], log: Path, cwd: Path, env: dict[str, str]) -> Iterator[int]:
        with log.open("w") as out:
            ray = subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, stdout=out, stderr=out)
        with ray:
            try:
                _wait_for_ray(log)
                yield ray.pid
            finally:
                ray.terminate()

    @staticmethod
    def end(folder: Path) -> None:
        """End what was started in `folder`, and remove it."""
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(FileNotFoundError):
            sock.connect(f"{folder}/socket")
            sock.sendall(bytes(8))
            sock.recv(1)  # nothing comes: it returns at the end of the other side
        shutil.rmtree(folder, ignore_errors=True)

    def _ray_command(self, processors: int, scratch: str, held: socket.socket) -> tuple[list[str], str]:
        """Return the command of a Ray at a port that is held until it has started, and its address."""
        port = held.getsockname()[1]
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--num-cpus={processors}", f"--port={port}", "--include-dashboard=false", f"--temp-dir={scratch}"]
        return command, f"127.0.0.1:{port}"


def _wait_for_ray(log: Path) -> None:
    deadline = time.monotonic() + 300
    while "Ray runtime started" not in (printed := log.read_text()):
        assert time.monotonic() < deadline, printed
        time.sleep(0.05)


class Request(NamedTuple):
    arguments: list[str]
    env: dict[str, str]
    cwd: str
    streams: list[int]


def serve(folder: Path, owner: int) -> None:
    """Fork the children, until `owner` ends or `Zygote.end` is called."""
    from recipe.dag.platform.environment import prepare_environment

    prepare_environment("cpu")
    before = set(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    _fill_caches()
    plain, of_drivers = (_listening(f"{folder}/socket{suffix}") for suffix in ("", ".drivers"))
    gc.collect()
    gc.freeze()  # a collection in a child would copy all pages
    first = os.getpid()
    if os.fork() == 0:
        plain.close()
        _import_ray()
        gc.freeze()
        added = {name: value for name, value in os.environ.items() if name not in before}
        os._exit(_fork_each(folder, of_drivers, first, added))
    of_drivers.close()
    print("ready", flush=True)
    _fork_each(folder, plain, owner, {})


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def _import_ray() -> None:
    """Import what drivers need, without a draw from Ray's generator of ids: all children would draw the same ones."""
    import ray.actor

    stock = ray.actor.ActorClassID
    ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: stock(os.urandom(stock.size())))
    for name in OF_DRIVERS:
        importlib.import_module(name)
    ray.actor.ActorClassID = stock


def _fork_each(folder: Path, listener: socket.socket, owner: int, env: dict[str, str]) -> int:
    """Fork a child for each connection, with the variables `env`, which imports have set."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    ended = os.pidfd_open(owner)
    selector.register(ended, selectors.EVENT_READ)
    callers: dict[int, Caller] = {}  # by the child's descriptor
    spent: dict[str, float] = {}  # CPU seconds of ended children, by the test process that they worked for
    first = os.environ.get("PYTEST_XDIST_WORKER", "master")
    while True:
        for key, _ in selector.select():
            if key.fileobj is ended:  # without having called Zygote.end
                end(callers)
                shutil.rmtree(folder, ignore_errors=True)
                return 0
            if key.fileobj is listener:
                sock = listener.accept()[0]
                try:
                    request = receive(sock)
                except ConnectionError:  # the caller was killed before it had asked
                    sock.close()
                    continue
                if request is None:
                    end(callers)
                    return 0
                if (child := os.fork()) == 0:
                    limit = resource.RLIMIT_FSIZE
                    resource.setrlimit(limit, resource.prlimit(peer_of(sock), limit))
                    for other in (listener, sock, *(caller.sock for caller in callers.values())):
                        other.close()
                    request = request._replace(env=env | request.env)
                    os._exit(run(request, f"{folder}/bin/python"))
                for fd in request.streams:
                    os.close(fd)
                named = folder / "children" / str(peer_of(sock))
                named.with_suffix(".new").write_text(str(child))
                named.with_suffix(".new").rename(named)
                with contextlib.suppress(ConnectionError):  # as of a caller that is killed later
                    sock.sendall(b"%d\n" % child)
                callers[descriptor := os.pidfd_open(child)] = Caller(
                    child, sock, request.env.get("PYTEST_XDIST_WORKER", first)
                )
                selector.register(descriptor, selectors.EVENT_READ, descriptor)
                selector.register(sock, selectors.EVENT_READ, descriptor)
            elif key.data in callers and key.fileobj is callers[key.data].sock:  # the caller was killed
                os.kill(callers[key.data].child, signal.SIGKILL)
                selector.unregister(key.fileobj)
            elif key.fileobj == key.data:  # the child has ended; what a caller's end brought with it is not news
                child, sock, tester = callers.pop(key.data)
                _, status, usage = os.wait4(child, 0)
                spent[tester] = spent.get(tester, 0.0) + usage.ru_utime + usage.ru_stime
                (folder / "spent" / f"{tester}.{os.getpid()}").write_text(str(spent[tester]))
                with contextlib.suppress(OSError):
                    sock.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                selector.unregister(key.data)
                with contextlib.suppress(KeyError):
                    selector.unregister(sock)
                os.close(key.data)
                sock.close()


def _fill_caches() -> None:
    """Do once what each run would do in its first seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from transformers import AutoModelForImageTextToText

    from recipe.dag.settings import compose

    AutoModelForImageTextToText._model_mapping.keys()  # verl asks for it: it imports all configurations
    compose.run_schema()
    compose.compose_file("tiny_cpu", (), ROOT / "recipe" / "retool_ma" / "config")
    figure = Figure(layout="constrained")
    figure.subplots().set_title("fonts")
    FigureCanvasAgg(figure).draw()


class Caller(NamedTuple):
    child: int
    sock: socket.socket
    tester: str


def end(callers: dict[int, Caller]) -> None:
    """End the children: Ray ends its own when it is terminated."""
    for caller in callers.values():
        os.kill(caller.child, signal.SIGTERM)
    for descriptor, caller in callers.items():
        if not select.select([descriptor], [], [], 10)[0]:
            os.kill(caller.child, signal.SIGKILL)


def peer_of(caller: socket.socket) -> int:
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def receive(caller: socket.socket) -> Request | None:
    """Return what a caller asks for; None: the end of all. Raises ConnectionError if it has gone."""
    size, control, _, _ = caller.recvmsg(8, socket.CMSG_SPACE(12))
    if size == bytes(8):
        return None
    streams = array.array("i")
    for _, _, sent in control:
        streams.frombytes(sent)
    body, whole = b"", int.from_bytes(size, "big")
    while len(body) < whole and (part := caller.recv(1 << 16)):
        body += part
    if not whole or len(body) < whole:
        for fd in streams:
            os.close(fd)
        raise ConnectionResetError
    return Request(*json.loads(body), list(streams))


def run(request: Request, python: str) -> int:
    """Run the program in this process, as the start of a Python does, and return its exit code."""
    try:
        _become(request, python)
        _execute(request.arguments, request.cwd)
        return 0
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # it waits for threads, as at every end
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _become(request: Request, python: str) -> None:
    """Take over the caller's streams, environment and folder."""
    os.setsid()
    for number, fd in enumerate(request.streams):
        os.dup2(fd, number)
        os.close(fd)
    for number in FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    unbuffered = "-u" in request.arguments or bool(request.env.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1 if unbuffered or os.isatty(1) else -1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    sys.orig_argv = [python, *request.arguments]
    random.seed()
    sys.modules["numpy"].random.seed()
    os.environ["PYTHON_EXEC"] = python  # what torchrun starts
    sys.meta_path.insert(0, _ImportOfStarters(python))
    if "ray" in sys.modules:  # what its import and that of the phases have read belongs to another process
        sys.modules["ray"]._raylet.Config.initialize("")
        sys.modules["recipe.dag.report.phases"].PHASES.__init__()


def _execute(arguments: list[str], cwd: str) -> None:
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        del arguments[0]
    python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [path for path in sys.path[1:] if path not in python_path]
    if arguments[0] == "-c":
        sys.path[:] = ["", *python_path, *installed]
        sys.argv, sys.modules["__main__"] = ["-c"], ModuleType("__main__")
        exec(arguments[1], sys.modules["__main__"].__dict__)
    elif arguments[0] == "-m":
        sys.path[:] = [cwd, *python_path, *installed]
        sys.argv = arguments[1:]
        warnings.filterwarnings("ignore", message=".*found in sys.modules.*")  # recipe.dag.app.main is imported
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [os.path.dirname(os.path.abspath(arguments[0])), *python_path, *installed]
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class _ImportOfStarters:
    """Lets Ray start its workers with `python`, in the driver and in the process that becomes a worker, and `verl-dag
    sft` its torchrun."""

    def __init__(self, python: str):
        self.patches: dict[str, Callable[[ModuleType], None]] = {
            "ray._private.services": self._with_executable,
            "recipe.dag.train.sft.launch": self._with_executable,
        }
        self.python = python
        for name in self.patches.keys() & sys.modules.keys():
            self.patches.pop(name)(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.patches:
            return None
        patch = self.patches.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def patched(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = patched
        return spec

    def _with_executable(self, module: ModuleType) -> None:
        module.sys = _Sys(self.python)  # pyright: ignore[reportAttributeAccessIssue]


class _Sys:
    """The module `sys`, but for the Python that starts others."""

    def __init__(self, executable: str):
        self.executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
