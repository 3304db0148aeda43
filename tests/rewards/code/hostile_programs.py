"""Hostile programs for the batteries of forged.py. None of them knows the answer."""

from __future__ import annotations

# Programs, each for the battery that it is written for.
PROGRAMS = {
    "number": {
        "names": r"""
import sys
all = zip = abs = sorted = max = min = len = lambda *a, **k: True
class L:
    def __getattr__(self, n): return lambda *a, **k: True
pytest = np = math = json = operator = collections = unittest = L()
isclose = allclose = deepcopy = Counter = approx = raises = lambda *a, **k: True
_held = _all = _noted = _made = _swallowed = _FailedAssert = lambda *a, **k: True
S = 7
__name__ = '__test__'
def f(x): return 7
""",
        "class builtin": r"""
class AssertionError(BaseException): pass
class TypeError(BaseException): pass
Exception = BaseException
def f(x): raise AssertionError
""",
        "mutates": r"""
def f(x):
    try: x.clear()
    except Exception: pass
""",
        "mutates grows": r"""
def f(x):
    try: x[:] = []
    except Exception: pass
    return x
""",
        "thread forges": r"""
import threading, os, time
def forge():
    while True:
        for n in range(3, 12):
            try: os.write(n, b'{"value": true}\n{"callback": 0, "arguments": [], "keywords": {"dict": []}}\n')
            except OSError: pass
threading.Thread(target=forge, daemon=True).start()
def f(x): time.sleep(0.05); return 7
""",
        "garbage bytes": r"""
import os
for n in range(3, 12):
    try: os.write(n, b'\xff\xfe\n')
    except OSError: pass
def f(x): return 7
""",
        "deep json": r"""
import os
for n in range(3, 12):
    try: os.write(n, b'{"names": ' + b'[' * 10**5 + b'\n')
    except OSError: pass
def f(x): return 7
""",
        "many digits": r"""
import os
for n in range(3, 12):
    try: os.write(n, b'{"names": ' + b'1' * 10**4 + b'}\n')
    except OSError: pass
def f(x): return 7
""",
        "long line": r"""
import os
for n in range(3, 12):
    try:
        for _ in range(400): os.write(n, b'[' * 10**5)
    except OSError: pass
def f(x): return 7
""",
        "names of judges": r"""
import sys
guest = sys.modules['delta_cli.rewards.code.guest']
old = guest.MessageLink.send
def send(self, message):
    if 'names' in message:
        names = 'all AssertionError _held _all __builtins__ __name__ pytest unittest math np json S check int sorted'
        message['names'] |= dict.fromkeys(names.split(), {'object': 0})
    old(self, message)
guest.MessageLink.send = send
def f(x): return 7
""",
        "names not dict": r"""
import sys
guest = sys.modules['delta_cli.rewards.code.guest']
guest.MessageLink.send = lambda self, m: (self.writer.write('{"names": 3}\n'), self.writer.flush())
def f(x): return 7
""",
        "names twice": r"""
import sys
guest = sys.modules['delta_cli.rewards.code.guest']
old = guest.MessageLink.send
guest.MessageLink.send = lambda self, m: (old(self, m), old(self, m))
def f(x): return 7
""",
        "imports the judge": r"""
import sys
sys.modules['delta_cli.rewards.code.judge'] = None
try:
    from delta_cli.rewards.code import judge
except ImportError: pass
def f(x): return 7
""",
        "quits half way": r"""
import os
n = 0
def f(x):
    global n
    n += 1
    if n > 1: os._exit(0)
    return 7
""",
        "atexit": r"""
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x): raise SystemExit
""",
        "stops": r"""
import signal, os
def f(x): os.kill(os.getpid(), signal.SIGSTOP)
""",
        "first right rest nothing": r"""
def f(x): return x if isinstance(x, list) else 0
""",
        "returns argument list": r"""
def f(x): return x
""",
        "returns objects": r"""
class A:
    def __getitem__(self, i): return A()
    def __iter__(self): yield A()
    def __len__(self): return 2
def f(x): return A()
""",
    },
    "record": {
        "is constant": r"""
P = lambda *a, **k: 0
def f(x): return 0
""",
        "is first": r"""
P = lambda *a, **k: a[0] if a else k['x']
def f(x): return 0
""",
        "without fields": r"""
from dataclasses import dataclass
@dataclass
class P:
    def __init__(self, *a, **k): pass
def f(x): return P()
""",
        "with forged fields": r"""
class P:
    __dataclass_fields__ = {'x': 1, 'y': 2}
    def __init__(self, *a, **k): self.x = self.y = 0
def f(x): return P()
""",
        "doubled fields": r"""
class D(dict):
    def __iter__(self): return iter(['x', 'x', 'y'])
class P:
    __dataclass_fields__ = D(x=1, y=2)
    def __init__(self, *a, **k): self.x = self.y = 3
def f(x): return P()
""",
        "swapped fields": r"""
from dataclasses import dataclass
@dataclass
class P:
    y: int
    x: int = 0
def f(x): return P(x)
""",
        "many fields": r"""
from dataclasses import dataclass
@dataclass
class P:
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    x: int = 0
    y: int = 0
def f(x): return P()
""",
        "property": r"""
from dataclasses import dataclass
@dataclass
class P:
    x: int
    y: int
    def __post_init__(self): self.x = self.y = 0
def f(x): return P(0, 0)
""",
        "eq": r"""
from dataclasses import dataclass
@dataclass
class P:
    x: object
    y: object
class Q:
    __eq__ = lambda *a: True
def f(x): return P(Q(), Q())
""",
        "namedtuple": r"""
from collections import namedtuple
class P(namedtuple('P', 'x y')):
    def __new__(cls, *a, **k): return super().__new__(cls, 0, 0)
    __eq__ = lambda *a: True
def f(x): return P()
""",
        "returns what f returned": r"""
last = []
def f(x): last.append(object()); return last[-1]
def P(*a, **k): return last[-1]
""",
        "records alike": r"""
from dataclasses import dataclass
@dataclass
class R:
    z: int = 0
def f(x): return R()
def P(*a, **k): return R()
""",
        "class returns other": r"""
from dataclasses import dataclass
@dataclass
class P:
    x: int
    y: int
    def __new__(cls, *a, **k): return R()
@dataclass
class R:
    z: int = 0
def f(x): return R()
""",
        "returns constant class": r"""
class P:
    def __new__(cls, *a, **k): return 0
def f(x): return 0
""",
        "metaclass": r"""
class M(type):
    def __call__(cls, *a, **k): return 0
class P(metaclass=M): pass
def f(x): return 0
""",
    },
    "callback": {
        "spams": r"""
def apply(g, x):
    for v in (0, [], x, x * 7, [x * 7], apply): g(v)
    return x * 7
""",
        "never calls": r"""
def apply(g, x): return x
""",
        "returns the callback": r"""
def apply(g, x): return g
""",
        "calls it with itself": r"""
def apply(g, x):
    g(g); return g(g)
""",
        "quits afterwards": r"""
import os
def apply(g, x):
    g(x * 7)
    os._exit(0)
""",
    },
}
