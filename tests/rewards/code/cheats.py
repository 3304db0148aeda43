"""Programs that cheat, for test_hostile.py. None of them knows the answer."""

from __future__ import annotations

SPRAY = r"""
import os, json
def spray(*messages):
    for number in range(1, 64):
        for message in messages:
            try: os.write(number, (json.dumps(message) + "\n").encode())
            except OSError: pass
"""

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
    "default arguments": "def f(x, *rest, **more): return rest or more or 7",
    "ends in the middle": r"""
import os
def f(x):
    if x == 4: os._exit(0)
    return 7
""",
}
