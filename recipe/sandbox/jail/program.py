"""A job's own process, from its fork to the end of its program.

Invariant: a Python program runs as in a fresh interpreter: it is `__main__`, its file is on disk, its tracebacks
contain only its own frames, and at its end threads are joined, exit functions run, its objects are destroyed and its
streams flushed. Objects of modules that were loaded before it are not destroyed, which is what makes a fresh
interpreter's end slow.
"""

from __future__ import annotations

import _signal  # the public functions convert results to enumerations, which costs every job
import atexit
import gc
import itertools
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from recipe.sandbox.jail import syscalls

PREPARATION_FAILED = 125
MAX_PENDING_SIGNALS = 256
NICENESS = 10
"""So that jobs do not starve the server."""


def become(streams: Sequence[int], directory: str, limits: Mapping[str, int], timeout_s: float, excess: int) -> None:
    """Set up streams, directory and limits of the process that runs the job's code.

    excess: address space in bytes that is in use before the program starts.
    """
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    for target, source in enumerate(streams):
        os.dup2(source, target)
    syscalls.close_from(3)
    _signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    os.nice(NICENESS)
    os.chdir(directory)
    cpu = cpu_seconds(limits["cpu_s"], timeout_s)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    # Soft below hard: the job gets SIGXCPU, which tells a CPU limit from any other kill.
    _limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    if limits["memory_mb"] > 0:
        _limit(resource.RLIMIT_AS, (limits["memory_mb"] << 20) + excess)
    # One more, for the jail's first process.
    _limit(resource.RLIMIT_NPROC, limits["processes"] + 1)


def limit_signals() -> None:
    """Limit the signals that wait for this process and its children, which are counted for the user of the host."""
    _limit(resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS)


def cpu_seconds(limit_s: float | None, timeout_s: float) -> int:
    """Return the CPU seconds after which a process gets SIGXCPU; without a limit, one more than the time-out."""
    return math.ceil(timeout_s) + 1 if limit_s is None else max(1, math.ceil(limit_s))


def be_the_first_victim() -> None:
    """Let the kernel end this process, not the trainer, if the machine runs out of memory. Call it before this process
    gives up its rights."""
    with suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(descriptor, b"1000")
        finally:
            os.close(descriptor)


def replace(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process with another program; never returns."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(argv[0], list(argv), environment)
    except OSError as error:
        os.write(2, f"[sandbox] {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


class Program:
    """A context that runs the program: `with Program(...) as code: exec(code)` at a module's top level.

    The modules of this package must have been removed from sys.modules.
    """

    def __init__(self, path: str, source: str, search: str):
        self._path = path
        self._source = source
        self._search = search
        self._main = sys.modules["__main__"]
        self._earlier = len(sys.modules)

    def __enter__(self) -> object:
        namespace = self._main.__dict__
        namespace.clear()
        loader = SourceFileLoader("__main__", self._path)
        namespace.update(
            __name__="__main__", __doc__=None, __package__=None, __loader__=loader, __spec__=None, __annotations__={},
            __builtins__=sys.modules["builtins"], __file__=self._path, __cached__=None,
        )  # fmt: skip
        sys.argv = [self._path]
        sys.orig_argv = [sys.executable, self._path]
        sys.path.insert(0, self._search)
        sys.path_importer_cache.pop(self._search, None)
        _reseed()
        gc.enable()
        try:
            return compile(self._source.encode(), self._path, "exec", dont_inherit=True)
        except BaseException as error:
            self._end(self._report(error, None), None)

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        # Without the first frame, which is that of the call of exec.
        self._end(0 if error is None else self._report(error, trace and trace.tb_next), trace)

    def _report(self, error: BaseException, trace: TracebackType | None) -> int:
        """Print the error as the interpreter would; return the exit code."""
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF
            with suppress(BaseException):
                print(error.code, file=sys.stderr)
            return 1
        error.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        try:
            sys.excepthook(type(error), error, trace)
        except BaseException as second:
            if isinstance(second, SystemExit):
                return self._report(second, None)
            with suppress(BaseException):
                print("Error in sys.excepthook:", file=sys.stderr)
                frames = second.__traceback__
                second.__context__, second.__traceback__ = None, frames and frames.tb_next
                sys.__excepthook__(type(second), second, second.__traceback__)
                print("\nOriginal exception was:", file=sys.stderr)
                sys.__excepthook__(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def _end(self, code: int, trace: TracebackType | None) -> None:
        with suppress(BaseException):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - private, not in the stubs
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            self._destroy(trace)
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except BaseException as error:
                code = code or 120
                with suppress(BaseException):
                    print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.__stderr__)
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)

    def _destroy(self, trace: TracebackType | None) -> None:
        """Destroy the program's objects: files are flushed, finalizers run."""
        for hook in ("last_type", "last_value", "last_traceback"):
            sys.__dict__.pop(hook, None)
        while trace is not None:
            with suppress(RuntimeError):
                trace.tb_frame.clear()
            trace = trace.tb_next
        for module in (self._main, *self._own_modules()):
            _clear(module.__dict__)
        gc.collect()

    def _own_modules(self) -> list[ModuleType]:
        """Return the modules that belong to the program, not to the interpreter."""
        # Only the modules added last are visited: each access writes to a page that is shared with the zygote.
        later = list(itertools.islice(reversed(sys.modules.values()), len(sys.modules) - self._earlier))
        own = (self._search + "/", os.getcwd() + "/")
        return [module for module in later if str(getattr(module, "__file__", None)).startswith(own)]


def _reseed() -> None:
    """Reseed the global generators that do not reseed themselves after a fork, as `random` does."""
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()
    algebra = sys.modules.get("sympy.core.random")
    if algebra is not None:
        algebra.seed()


def _clear(namespace: dict[str, object]) -> None:
    """Set all names to None in the interpreter's order: private names first."""
    for private in (True, False):
        for name in list(namespace):
            if name.startswith("_") is private and not name.startswith("__"):
                namespace[name] = None


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    ceiling = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        # A hard limit that is already lower cannot be raised, and need not be.
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))
