"""The filter allows what ordinary programs do: each program here prints what it prints outside of the sandbox."""

from __future__ import annotations

import shutil

import pytest

# Program and what it prints.
PROGRAMS = {
    "numpy": (
        r"""
import numpy as n; print(n.linalg.solve(n.eye(300) * 2, n.ones(300)).sum(), n.fft.fft([1, 0]).real)
""",
        "150.0 [1. 1.]\n",
    ),
    "sympy": (
        r"""
from sympy import *; x = symbols('x'); print(integrate(x * exp(x), x), factorint(2**31 - 2))
""",
        "(x - 1)*exp(x) {2: 1, 3: 2, 7: 1, 11: 1, 31: 1, 151: 1, 331: 1}\n",
    ),
    # Not by an import statement, which would start one more zygote, and that would count as a leak.
    "pandas": (
        r"""
p = __import__('pandas')
d = p.DataFrame({'a': [1, 1, 2], 'b': [3, 4, 5]}); d.to_csv('d.csv', index=False)
print(p.read_csv('d.csv').groupby('a').b.sum().to_dict())
""",
        "{1: 7, 2: 5}\n",
    ),
    "matplotlib": (
        r"""
import matplotlib; matplotlib.use('Agg')
import matplotlib.pyplot as p; p.plot([1, 2]); p.savefig('f.png')
print(open('f.png', 'rb').read(4))
""",
        "b'\\x89PNG'\n",
    ),
    "threads": (
        r"""
from concurrent.futures import ThreadPoolExecutor as T
import threading, time
barrier = threading.Barrier(4)
with T(4) as pool: print(sorted(pool.map(lambda i: (barrier.wait(5), time.sleep(0.01), i)[2], range(4))))
""",
        "[0, 1, 2, 3]\n",
    ),
    "processes": (
        r"""
import multiprocessing as m
from multiprocessing import shared_memory as s
import mmap, os
def work(q, a, name, e):
    block = s.SharedMemory(name); block.buf[0] = 7; block.close()
    with a.get_lock(): a[1] += 5
    q.put(os.getpid() != os.getppid()); e.set()
if __name__ == '__main__':
    q, a, e, block = m.Queue(), m.Array('i', [1, 2]), m.Event(), s.SharedMemory(create=True, size=99)
    p = m.Process(target=work, args=(q, a, block.name, e)); p.start()
    print(q.get(timeout=20), e.wait(20)); p.join(); print(a[:], block.buf[0], p.exitcode)
    block.close(); block.unlink()
    with m.Manager() as manager:
        d = manager.dict(); d['x'] = 1; print(dict(d))
""",
        "True True\n[1, 7] 7 0\n{'x': 1}\n",
    ),
    "shared anonymous memory": (
        r"""
import mmap, os
m = mmap.mmap(-1, 4096)
if os.fork() == 0: m[0] = 65; os._exit(0)
os.wait(); print(m[:1])
""",
        "b'A'\n",
    ),
    "pipeline": (
        r"""
import subprocess
def run(line):
    print(subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split())
run("mkdir -p d/e; printf 'b 2\na 1\n' > d/t; sort d/t | awk '{print $2}' | sed s/1/one/ | tee o")
run("tar czf t.tgz d; rm -r d; tar xzf t.tgz; gzip -k d/t; zcat d/t.gz | wc -l; find d -type f | sort | xargs ls")
run("cp -a d c; diff -r c d && mv c d/e; ln -s t d/s; readlink d/s; cat <(echo sub); python3 -c 'print(6 * 7)'")
run("mkfifo f; (echo in > f &); cat f; flock l echo locked; touch -d @0 z; stat -c %Y z; nice -n 5 true; seq 3 | tac")
""",
        "['one', '2']\n['2', 'd/t', 'd/t.gz']\n['t', 'sub', '42']\n['in', 'locked', '0', '3', '2', '1']\n",
    ),
    "asyncio": (
        r"""
import asyncio, sys
async def main():
    async def serve(r, w): w.write((await r.readline()).upper()); await w.drain(); w.close()
    for kind in ('tcp', 'unix'):
        if kind == 'tcp':
            server = await asyncio.start_server(serve, '127.0.0.1', 0)
            r, w = await asyncio.open_connection(*server.sockets[0].getsockname())
        else:
            server = await asyncio.start_unix_server(serve, 'sock')
            r, w = await asyncio.open_unix_connection('sock')
        w.write(b'hi\n'); print(await r.read()); w.close(); server.close()
    p = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1); print(await p.communicate(b'x'))
    print(await asyncio.to_thread(lambda: 'thread'))
asyncio.run(main())
""",
        "b'HI\\n'\nb'HI\\n'\n(b'x', None)\nthread\n",
    ),
    "http": (
        r"""
import http.server as h, threading, urllib.request
class H(h.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'served')
    def log_message(self, *a): pass
s = h.ThreadingHTTPServer(('127.0.0.1', 0), H)
threading.Thread(target=s.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f'http://127.0.0.1:{s.server_port}').read())
""",
        "b'served'\n",
    ),
    "files": (
        r"""
import sqlite3, tempfile, mmap, os, shutil, fcntl, pathlib
c = sqlite3.connect('x.db'); c.execute('pragma journal_mode=wal'); c.execute('create table t(a)')
c.executemany('insert into t values (?)', [(i,) for i in range(9)]); c.commit()
print(sqlite3.connect('x.db').execute('select sum(a) from t').fetchall())
with tempfile.NamedTemporaryFile() as f, tempfile.TemporaryDirectory() as d:
    f.write(b'abc' * 2000); f.flush(); m = mmap.mmap(f.fileno(), 0); m[:1] = b'z'; m.flush(); m.close()
    shutil.copy2(f.name, d + '/x'); shutil.copytree(d, 'tree'); shutil.make_archive('a', 'zip', 'tree')
    print(open('tree/x').read(4), os.stat('tree/x').st_size); fcntl.flock(f, fcntl.LOCK_EX)
    fcntl.lockf(f, fcntl.LOCK_EX); os.posix_fallocate(f.fileno(), 0, 9999); os.fsync(f.fileno())
os.symlink('a.zip', 's'); os.link('a.zip', 'l'); os.truncate('l', 5); os.rename('l', 'k')
os.chmod('k', 0o600)
os.utime('k', (1, 2)); os.mkfifo('p'); os.sync(); print(sorted(p.name for p in pathlib.Path().glob('?')))
""",
        "[(36,)]\nzbca 6000\n['k', 'p', 's']\n",
    ),
    "signals": (
        r"""
import faulthandler, os, select, signal, threading, time
faulthandler.enable(); seen = []
for n in (signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD): signal.signal(n, lambda n, f: seen.append(n))
signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause(); os.kill(os.getpid(), signal.SIGUSR1)
signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); os.kill(os.getpid(), signal.SIGUSR2)
print(signal.sigtimedwait([signal.SIGUSR2], 5).si_signo, [int(n) for n in seen])
child = os.fork()
if child == 0: os.setsid(); time.sleep(60)
fd = os.pidfd_open(child); signal.pidfd_send_signal(fd, signal.SIGKILL)
print(bool(select.select([fd], [], [], 10)[0]), os.waitpid(child, 0)[1], os.nice(0) < os.nice(1), os.cpu_count() > 0)
faulthandler.dump_traceback_later(60); faulthandler.cancel_dump_traceback_later()
""",
        "12 [14, 10, 10]\nTrue 9 True True\n",
    ),
    "daemon": (
        r"""
import os
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.umask(0o22); os.write(w, b'daemon')
    os._exit(0)
os.wait(); print(os.read(r, 9))
""",
        "b'daemon'\n",
    ),
    "ctypes": (
        r"""
import ctypes
c = ctypes.CDLL(None)
Int = ctypes.POINTER(ctypes.c_int)
Compare = ctypes.CFUNCTYPE(ctypes.c_int, Int, Int)
a = (ctypes.c_int * 4)(3, 1, 2, 0); c.qsort(a, 4, 4, Compare(lambda x, y: x[0] - y[0]))
print(list(a))
""",
        "[0, 1, 2, 3]\n",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_python(box, name):
    if name in ("pandas", "matplotlib", "numpy", "sympy"):
        pytest.importorskip(name)
    code, printed = PROGRAMS[name]
    run = box.run(code, timeout_s=60).run
    assert (run.stdout, run.return_code) == (printed, 0), run.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_cpp(box):
    code = """
#include <chrono>
#include <future>
#include <iostream>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>
int main() {
    std::mutex lock; int sum = 0; std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&, i] { std::lock_guard<std::mutex> hold(lock); sum += i; });
    for (auto& thread : threads) thread.join();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::random_device device;
    try { std::async(std::launch::async, []() -> int { throw std::runtime_error("caught"); }).get(); }
    catch (const std::exception& error) { std::cout << sum << ' ' << error.what() << (device() >= 0) << std::endl; }
}
"""
    run = box.run(code, language="cpp", timeout_s=60).run
    assert (run.stdout, run.return_code) == ("6 caught1\n", 0), run.stderr
