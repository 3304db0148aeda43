"""Programs that attack, for test_hostile.py. None of them knows the answer."""

from __future__ import annotations

IMPORTS = "import os, sys, time\n"

CALLING = r"""
import ctypes
libc = ctypes.CDLL(None)
"""

# What f does when it is called.
ATTACKS = {
    "fork bomb": "while True: os.fork()",
    "thread bomb": r"""
import threading
while True: threading.Thread(target=time.sleep, args=(99,)).start()
""",
    "memory bomb": r"""
held = []
while True: held.append(bytearray(2**26))
""",
    "memory bomb in threads": r"""
import threading
threading.Thread(target=lambda: [0] * 2**30).start()
return [0] * 2**30
""",
    "one big allocation": "bytearray(2**36)",
    "big integer": "return 10 ** 10 ** 9",
    "big string": "return 'a' * 2**30",
    "endless output": "while True: os.write(1, b'9' * 65536)",
    "endless output on stderr": "while True: os.write(2, b'9' * 65536)",
    "endless loop": "while True: pass",
    "endless sleep": "time.sleep(999)",
    "endless in C": "return sum(iter(int, 1))",
    "closes its output and sleeps": "os.close(1); time.sleep(999)",
    "ignores signals": r"""
import signal
[signal.signal(s, signal.SIG_IGN) for s in (2, 15, 24)]
while True: pass
""",
    "stops itself": r"""
import signal
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "child that outlives it": r"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(999)
""",
    "spawns": r"""
import subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'])
""",
    "multiprocessing": r"""
import multiprocessing
multiprocessing.Process(target=time.sleep, args=(999,)).start()
""",
    "fills the disk": r"""
i = 0
while True:
    i += 1
    open(f'file{i}', 'wb').write(b'0' * 2**24)
""",
    "sparse file": "open('file', 'wb').truncate(2**50)",
    "many files": r"""
i = 0
while True:
    i += 1
    open(f'{i}', 'w').close()
""",
    "many folders": r"""
while True:
    os.mkdir('a'); os.chdir('a')
""",
    "open files": r"""
held = []
while True: held.append(open('/dev/null'))
""",
    "pipes": r"""
held = []
while True: held.append(os.pipe())
""",
    "kills everyone": r"""
import signal
os.kill(os.getppid(), 9)
os.kill(1, 9)
os.kill(-1, 9)
""",
    "exits early": "sys.exit(0)",
    "exits hard": "os._exit(0)",
    "exits at exit": r"""
import atexit
atexit.register(os._exit, 0)
""",
    "aborts": "os.abort()",
    "crashes": r"""
import ctypes
ctypes.string_at(0)
""",
    "recurses": r"""
sys.setrecursionlimit(10**9)
def r(): return r()
r()
""",
    "execs": "os.execv('/bin/true', ['true'])",
    "execs python": "os.execv(sys.executable, ['python', '-c', 'print(1)'])",
    "raises everything": "raise BaseException('x')",
    "raises SystemExit(0)": "raise SystemExit(0)",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises GeneratorExit": "raise GeneratorExit",
    "raises StopIteration": "raise StopIteration(987)",
    "raises StopAsyncIteration": "raise StopAsyncIteration",
    "raises AssertionError": "raise AssertionError('passed')",
    "raises an unprintable": r"""
class E(Exception):
    def __str__(self): raise E
raise E
""",
    "raises a nameless": "raise type('', (Exception,), {})",
    "raises SkipTest": r"""
import unittest
raise unittest.SkipTest('x')
""",
    "cyclic list": "a = []; a.append(a); return a",
    "deep list": r"""
a = []
for _ in range(10**6): a = [a]
return a
""",
    "deep json": r"""
a = 7
for _ in range(900): a = [a]
return a
""",
    "endless iterator": "return iter(int, 1)",
    "endless generator": r"""
def g():
    while True: yield 7
return g()
""",
    "not a number": "return float('nan')",
    "infinity": "return float('inf')",
    "lone surrogate": r"return '\ud800'",
    "huge tuple": "return tuple(range(10**7))",
    "itself": "return f",
    "a class": "return int",
    "a module": "return sys",
    "the frame": "return sys._getframe()",
    "a bound method": "return (3).__eq__",
    "True": "return True",
    "None": "return None",
    "its argument": "return x",
    "raises the limits": r"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))
return bytearray(2**31)[0]
""",
    "becomes root": "os.setuid(0); os.setgid(0)",
    "nice": "os.nice(-20)",
    "socket": r"""
import socket
socket.create_connection(('1.1.1.1', 53), 0.2)
""",
    "unix socket": r"""
import socket
s = socket.socket(socket.AF_UNIX); s.connect('/run/docker.sock')
""",
    "name lookup": r"""
import socket
socket.gethostbyname('example.com')
""",
    "fifo": "os.mkfifo('p'); open('p').read()",
    "symlink out": "os.symlink('/', 'root'); open('root/etc/owned', 'w')",
    "core dump": r"""
import signal
os.kill(os.getpid(), signal.SIGQUIT)
""",
    "imports forever": r"""
import importlib
while True: importlib.reload(importlib.import_module('json'))
""",
    "regular expression": r"""
import re
re.match('(a+)+$', 'a' * 60 + 'b')
""",
    "sorts forever": r"""
class K:
    def __lt__(self, o): time.sleep(9); return True
sorted([K(), K()])
""",
    "finaliser": r"""
class D:
    def __del__(self): time.sleep(99)
D()
""",
    "shared memory": CALLING
    + r"""
while True:
    i = libc.shmget(0, 2**28, 0o1600)
    if i < 0: return 7
    libc.shmat.restype = ctypes.c_void_p
    ctypes.memset(libc.shmat(i, None, 0), 1, 2**28)
""",
    "anonymous files": r"""
held = []
while True:
    held.append(os.memfd_create('x')); os.write(held[-1], b'1' * 2**23)
""",
    "message queues": CALLING
    + r"""
while libc.msgget(0, 0o1600) >= 0: pass
return 7
""",
    "new namespaces": CALLING
    + r"""
return 7 if libc.unshare(0x10000000) else 8
""",
    "new process by hand": CALLING
    + r"""
libc.syscall(56, 17, 0, 0, 0, 0); return 7
""",
    "traces": CALLING
    + r"""
libc.ptrace(16, 1, 0, 0); return 7
""",
    "mounts": CALLING
    + r"""
libc.mount(b'x', b'/scratch', b'tmpfs', 0, None); return 7
""",
}
