"""The program that runs a notebook's cells inside the sandbox.

Invariant: the process that answers the server never runs a cell. It forks the interpreter, which can neither trace nor
read it, sends it one cell at a time, collects its output, and accepts an answer only with the secret that it sent with
that cell. It imports nothing of this package (the server sends its text as a job), reads one JSON request from stdin,
and writes one line of JSON per finished cell: stdout, stderr, and the interpreter's own answer as a string.
"""

import ast
import base64
import ctypes
import importlib.util
import io
import json
import linecache
import os
import select
import signal
import socket
import sys
import traceback
import types
from contextlib import suppress

KEPT = 1 << 20
"""Bytes kept of each stream of a cell. A pipe holds no more, either."""
END_MS = 2000
"""Time for the interpreter to end after the last cell: it flushes files, but may have threads that never end."""
PR_SET_DUMPABLE = 4


class CellTimeoutError(BaseException):
    pass


class Plain:
    """A shell without IPython: plain Python, which shows the value of a last expression by its repr."""

    def __init__(self):
        # Pickle looks up what a cell defines in the module of that name.
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        self.names = module.__dict__
        self.names["__builtins__"] = __builtins__
        self.count = 0

    def run(self, source):
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            body = ast.parse(source, name)
            last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
            exec(compile(body, name, "exec"), self.names)
            value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), self.names)
            return ([] if value is None else [{"text/plain": repr(value)}]), []
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            lines = traceback.format_exception(type(error), error, trace)
            return [], [{"ename": type(error).__name__, "evalue": str(error), "traceback": lines}]


class Rich:
    """A shell with IPython: magics, top-level await, rich display, figures."""

    def __init__(self):
        from IPython.core.displayhook import CapturingDisplayHook
        from IPython.core.displaypub import CapturingDisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        # Not imported, since that would import matplotlib for cells that do not need it.
        if importlib.util.find_spec("matplotlib_inline"):
            os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"

        class Shell(InteractiveShell):
            system = InteractiveShell.system_raw  # the other one needs a terminal

            def enable_gui(self, gui=None):
                """There is no event loop to join."""

        config = Config()
        config.HistoryManager.enabled = False
        self.shell = Shell.instance(config=config, colors="nocolor")
        self.published = CapturingDisplayPublisher()
        self.shell.display_pub = self.published
        self.outputs = self.published.outputs
        hook = CapturingDisplayHook(shell=self.shell, outputs=self.outputs)
        self.shell.display_trap.hook = hook
        self.errors = []
        self.shell._showtraceback = self.keep

    def keep(self, etype, evalue, stb):
        self.errors.append({"ename": etype.__name__, "evalue": str(evalue), "traceback": list(stb)})

    def run(self, source):
        self.outputs.clear()
        self.errors.clear()
        self.shell.run_cell(source, store_history=True)
        return [clean(item["data"]) for item in self.outputs], list(self.errors)


def clean(data):
    """Return a mime dict that JSON can hold."""
    return {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value for kind, value in data.items()
    }


def run_cell(shell, source, limit):
    """Return what the cell shows and its error, as JSON. limit: seconds; 0: none."""

    def expire(_number, _frame):
        raise CellTimeoutError(f"the cell ran longer than {limit:g} s")

    signal.signal(signal.SIGALRM, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(limit, 0.0))
            display, errors = shell.run(source)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        answer = json.dumps({"display": display, "error": errors}, ensure_ascii=False, default=repr)
    except BaseException as error:
        # The time ran out at the very end, the cell broke the code that shows its errors, or shows what is not JSON.
        errors = [{"ename": type(error).__name__, "evalue": str(error), "traceback": []}]
        answer = json.dumps({"display": [], "error": errors}, ensure_ascii=False)
    sys.stdout, sys.stderr = sys.stdout or sys.__stdout__, sys.stderr or sys.__stderr__
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess] - the cell may have set anything
    return answer.encode("utf-8", "replace")


def interpret(channel):
    """Run the cells that arrive, until the other process closes the channel."""
    for stream in (sys.stdout, sys.stderr):
        # Keeps the order with the output of child processes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    try:
        shell = Rich()
    except ImportError:
        shell = Plain()
    for line in channel.makefile("rb"):
        secret, source, limit = json.loads(line)
        # The first newline ends what a cell may have written into the channel.
        channel.sendall(b"\n" + secret.encode() + run_cell(shell, source, limit) + b"\n")


class Answers:
    """The answering process: asks the interpreter for one cell after the other."""

    def __init__(self, interpreter, channel, outputs):
        self.interpreter, self.channel = interpreter, channel
        self.ended = os.pidfd_open(interpreter)
        self.kept = {number: bytearray() for number in outputs}
        self.poll = select.poll()
        for number in (*outputs, channel.fileno(), self.ended):
            self.poll.register(number, select.POLLIN)

    def run(self):
        """Answer all cells; return the exit code, which is 0 only if the interpreter answered each of them."""
        request = json.loads(sys.stdin.buffer.read())
        room = request["answer_bytes"]
        for source in request["cells"]:
            secret = os.urandom(16).hex()
            with suppress(BrokenPipeError, ConnectionResetError):
                self.channel.sendall(json.dumps([secret, source, request["cell_timeout"]]).encode() + b"\n")
            answer = self.wait(secret.encode(), room)
            stdout, stderr = (bytes(kept).decode("utf-8", "replace") for kept in self.kept.values())
            line = json.dumps([stdout, stderr, (answer or b"").decode("utf-8", "replace")])
            room -= len(line)
            if room < 0:
                print(f"[sandbox] the results of the cells exceed {request['answer_bytes']} bytes", file=sys.stderr)
                return 1
            if answer is None:
                sys.stderr.write(stderr)
                return self.fail()
            print(line, flush=True)
            for kept in self.kept.values():
                kept.clear()
        self.channel.shutdown(socket.SHUT_WR)
        self.wait(b"\n", KEPT, END_MS)
        return 0

    def wait(self, secret, room, timeout_ms=None):
        """Collect output until the answer arrives; return None if the interpreter ends, or can answer no more."""
        received, answer, over = bytearray(), None, False
        while not over:
            events = dict(self.poll.poll(timeout_ms))
            over = not events or self.ended in events
            if self.channel.fileno() in events:
                data = self.channel.recv(1 << 16)
                if not data:
                    self.poll.unregister(self.channel.fileno())
                    timeout_ms = END_MS
                received += data
                # A cell may have written anything else; only the line with the secret counts.
                lines = bytes(received).split(b"\n")[:-1] if b"\n" in data else []
                answer = next((line[len(secret) :] for line in lines if line.startswith(secret)), None)
                over |= answer is not None or len(received) > room
            for number in self.kept:
                if number in events or over:
                    self.read(number)
        return answer

    def read(self, number):
        """Keep what is in the pipe now: all that was written before the answer."""
        with suppress(BlockingIOError):
            data = os.read(number, KEPT)
            self.kept[number] += data[: KEPT - len(self.kept[number])]
            if not data:
                with suppress(KeyError):
                    self.poll.unregister(number)

    def fail(self):
        """Return the interpreter's exit code, but never 0; if a signal ended it, end by the same one."""
        os.kill(self.interpreter, signal.SIGKILL)  # without effect if it has ended
        code = os.waitstatus_to_exitcode(os.waitpid(self.interpreter, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        return code or 1


def main():
    # From here on only the kernel can read this process. /proc/PID/mem, fd and environ need the right to trace it.
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_DUMPABLE, 0)
    channel, inner = socket.socketpair()
    outputs = os.pipe(), os.pipe()
    interpreter = os.fork()
    if interpreter == 0:
        channel.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((null, outputs[0][1], outputs[1][1])):
            os.dup2(source, target)
        for number in (null, *outputs[0], *outputs[1]):
            os.close(number)
        prctl(PR_SET_DUMPABLE, 1)
        interpret(inner)
        return
    inner.close()
    for read, write in outputs:
        os.close(write)
        os.set_blocking(read, False)
    code = Answers(interpreter, channel, [read for read, _ in outputs]).run()
    sys.stderr.flush()
    os._exit(code)


main()
