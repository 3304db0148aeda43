"""Over a hundred programs that attack or cheat, for test_hostile.py. None of them knows the answer."""

from __future__ import annotations

IMPORTS = "import os, sys, time\n"
CALLING = r"""
import ctypes
libc = ctypes.CDLL(None)
"""
SPRAY = r"""
import os, json
def spray(*messages):
    for number in range(1, 64):
        for message in messages:
            try: os.write(number, (json.dumps(message) + "\n").encode())
            except OSError: pass
"""

# What f does when it is called.
ATTACKS = {
    "fork bomb": r"""
while True: os.fork()
""",
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
    "one big allocation": r"""
bytearray(2**36)
""",
    "big integer": r"""
return 10 ** 10 ** 9
""",
    "big string": r"""
return 'a' * 2**30
""",
    "endless output": r"""
while True: os.write(1, b'9' * 65536)
""",
    "endless output on stderr": r"""
while True: os.write(2, b'9' * 65536)
""",
    "endless loop": r"""
while True: pass
""",
    "endless sleep": r"""
time.sleep(999)
""",
    "endless in C": r"""
return sum(iter(int, 1))
""",
    "closes its output and sleeps": r"""
os.close(1); time.sleep(999)
""",
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
    "sparse file": r"""
open('file', 'wb').truncate(2**50)
""",
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
    "exits early": r"""
sys.exit(0)
""",
    "exits hard": r"""
os._exit(0)
""",
    "exits at exit": r"""
import atexit
atexit.register(os._exit, 0)
""",
    "aborts": r"""
os.abort()
""",
    "crashes": r"""
import ctypes
ctypes.string_at(0)
""",
    "recurses": r"""
sys.setrecursionlimit(10**9)
def r(): return r()
r()
""",
    "execs": r"""
os.execv('/bin/true', ['true'])
""",
    "execs python": r"""
os.execv(sys.executable, ['python', '-c', 'print(1)'])
""",
    "raises everything": r"""
raise BaseException('x')
""",
    "raises SystemExit(0)": r"""
raise SystemExit(0)
""",
    "raises KeyboardInterrupt": r"""
raise KeyboardInterrupt
""",
    "raises GeneratorExit": r"""
raise GeneratorExit
""",
    "raises StopIteration": r"""
raise StopIteration(987)
""",
    "raises StopAsyncIteration": r"""
raise StopAsyncIteration
""",
    "raises AssertionError": r"""
raise AssertionError('passed')
""",
    "raises an unprintable": r"""
class E(Exception):
    def __str__(self): raise E
raise E
""",
    "raises a nameless": r"""
raise type('', (Exception,), {})
""",
    "raises SkipTest": r"""
import unittest
raise unittest.SkipTest('x')
""",
    "cyclic list": r"""
a = []; a.append(a); return a
""",
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
    "endless iterator": r"""
return iter(int, 1)
""",
    "endless generator": r"""
def g():
    while True: yield 7
return g()
""",
    "not a number": r"""
return float('nan')
""",
    "infinity": r"""
return float('inf')
""",
    "lone surrogate": r"""
return '\ud800'
""",
    "huge tuple": r"""
return tuple(range(10**7))
""",
    "itself": r"""
return f
""",
    "a class": r"""
return int
""",
    "a module": r"""
return sys
""",
    "the frame": r"""
return sys._getframe()
""",
    "a bound method": r"""
return (3).__eq__
""",
    "True": r"""
return True
""",
    "None": r"""
return None
""",
    "its argument": r"""
return x
""",
    "raises the limits": r"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))
return bytearray(2**31)[0]
""",
    "becomes root": r"""
os.setuid(0); os.setgid(0)
""",
    "nice": r"""
os.nice(-20)
""",
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
    "fifo": r"""
os.mkfifo('p'); open('p').read()
""",
    "symlink out": r"""
os.symlink('/', 'root'); open('root/etc/owned', 'w')
""",
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

# Ways to look right without knowing the answer. Two of them would show that they found it by giving it.
CHEATS = {
    "equal to everything": r"""
class A(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = int.__hash__
def f(x): return A()
""",
    "an object equal to everything": r"""
class A:
    __eq__ = lambda *_: True
    __bool__ = lambda *_: True
def f(x): return A()
""",
    "patched builtins": r"""
import builtins
builtins.AssertionError = type('Never', (Exception,), {})
builtins.__build_class__ = None
builtins.int = builtins.float = builtins.str = lambda *_: 0
def f(x): return 7
""",
    "patched json": r"""
import json
json.dumps = json.loads = lambda *_, **__: '{"value": true}'
def f(x): return 7
""",
    "frames": r"""
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in (*frame.f_code.co_consts, *frame.f_locals.values()) if isinstance(v, int) and v > 10**10]
        frame = frame.f_back
    return found[0] + x - 3 if found else 7
""",
    "garbage collector": r"""
import gc
def f(x):
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            values = thing.values() if isinstance(thing, dict) else thing
            for value in list(values):
                if type(value) is int and 10**14 < value < 10**16: return value + x - 3
    return 7
""",
    "trace": r"""
import sys
def tracer(frame, event, argument): return tracer
sys.settrace(tracer)
def f(x): return 7
""",
    "forged messages": r"""
import os, json
lines = [{"passed": 2, "checks": 2, "failed": 0}, {"value": True}, {"names": {"__builtins__": {"dict": []}}}]
for number in range(1, 64):
    for line in (*map(json.dumps, lines), "2 2 0"):
        try: os.write(number, (line + "\n").encode())
        except OSError: pass
def f(x): return 7
""",
    "replaced names": r"""
abs = len = print = isinstance = lambda *_: True
class AssertionError(BaseException): pass
def f(x): return 7
""",
    "the answer on disk": r"""
import os
secret = 987654321012 * 1000 + 345
def f(x):
    for folder, _, names in os.walk("/"):
        for name in names:
            try:
                if str(secret) in open(os.path.join(folder, name), errors="ignore").read(10**6): return secret + x - 3
            except OSError: pass
    return 7
""",
    "the answer in open files and other processes": r"""
import os
secret = 987654321012 * 1000 + 345
def f(x):
    for place in [*range(3, 64), *(f"/proc/{p}/{name}" for p in range(400) for name in ("cmdline", "environ"))]:
        try:
            text = os.pread(place, 10**6, 0).decode(errors="ignore") if isinstance(place, int) else open(place).read()
            if str(secret) in text: return secret + x - 3
        except OSError: pass
    return 7
""",
    "a list equal to everything": r"""
class A(list):
    __eq__ = lambda *_: True
    __len__ = lambda _: 1
def f(x): return A()
""",
    "a text equal to everything": r"""
class A(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
def f(x): return A()
""",
    "a float equal to everything": r"""
class A(float):
    __eq__ = lambda *_: True
    __hash__ = float.__hash__
def f(x): return A(1)
""",
    "a class that pretends": r"""
class A:
    __class__ = int
    __int__ = __index__ = lambda _: 987
    __eq__ = lambda *_: True
def f(x): return A()
""",
    "a metaclass": r"""
class M(type):
    __eq__ = lambda *_: True
    __hash__ = type.__hash__
class A(metaclass=M): pass
def f(x): return A
""",
    "a data class without fields": r"""
from dataclasses import dataclass
@dataclass
class A:
    pass
    __eq__ = lambda *_: True
def f(x): return A()
""",
    "a forged data class": r"""
class A:
    __dataclass_fields__ = {}
    __eq__ = lambda *_: True
def f(x): return A()
""",
    "a mock": r"""
from unittest.mock import MagicMock, ANY
def f(x): return ANY
""",
    "numpy that compares": r"""
import numpy as np
class A(np.ndarray):
    __eq__ = lambda *_: True
def f(x): return np.zeros(1).view(A)
""",
    "numpy objects": r"""
import numpy as np
class E:
    __eq__ = lambda *_: True
def f(x): return np.array([E()], dtype=object)
""",
    "shadowed math": r"""
class math:
    isclose = staticmethod(lambda *_, **__: True)
def f(x): return 7
""",
    "shadowed helpers": r"""
isclose = allclose = approx = deepcopy = raises = lambda *_, **__: True
def f(x): return 7
""",
    "shadowed judge": r"""
_held = held = judge = Judge = StandIn = check = lambda *_, **__: True
def f(x): return 7
""",
    "tests of its own": r"""
def test_a(): assert True
class TestB:
    def test_b(self): pass
def f(x): return 7
""",
    "a TestCase of its own": r"""
import unittest
class T(unittest.TestCase):
    def test_a(self): pass
def f(x): return 7
""",
    "patched unittest": r"""
import unittest
unittest.TestCase.run = lambda *_: None
unittest.TestCase.assertEqual = lambda *_: None
def f(x): return 7
""",
    "patched modules": r"""
import sys, types
for name in ('pytest', 'math', 'numpy', 'unittest', 'solution'):
    sys.modules[name] = types.ModuleType(name)
def f(x): return 7
""",
    "patched import": r"""
import builtins
builtins.__import__ = lambda *_, **__: None
def f(x): return 7
""",
    "a module that lies": r"""
import types
class M(types.ModuleType):
    isclose = lambda *_: True
math = np = M('math')
def f(x): return 7
""",
    "counted results": SPRAY
    + r"""
spray({"value": 987654321012345}, {"passed": 2})
for n in range(1, 64):
    try: os.write(n, b"2 2 0\n1 1 0")
    except OSError: pass
def f(x): return 7
""",
    "forged objects": SPRAY
    + r"""
def f(x):
    spray({"object": 0, "record": "A", "fields": []}, {"value": {"object": 0}})
    return 7
""",
    "forged callbacks": SPRAY
    + r"""
def f(x):
    spray({"callback": 0, "arguments": [], "keywords": {"dict": []}})
    return 7
""",
    "forged exceptions": SPRAY
    + r"""
def f(x):
    spray({"raise": "StopIteration", "bases": ["StopIteration"], "message": "", "number": 0})
    return 7
""",
    "forged nonsense": SPRAY
    + r"""
def f(x):
    spray([], 7, None, {"dict": 3}, {"tuple": 3}, {"int": "zz"}, {"value": {"set": [[1]]}})
    return 7
""",
    "closes the link": r"""
import os
def f(x):
    os.closerange(0, 64)
    return 7
""",
    "mutates its argument": r"""
def f(x):
    try: x.clear()
    except AttributeError: pass
    return x
""",
    "default arguments": r"""
def f(x, *rest, **more): return rest or more or 7
""",
    "ends in the middle": r"""
import os
def f(x):
    if x == 4: os._exit(0)
    return 7
""",
}
