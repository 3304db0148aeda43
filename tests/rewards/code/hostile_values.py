"""Hostile values for f to return in the batteries of forged.py. None of them is the answer."""

from __future__ import annotations

# What f returns: each source defines A, which makes the value.
VALUES = {
    "sub zero": r"""
class A:
    __sub__ = __rsub__ = __xor__ = __abs__ = lambda *_: 0
""",
    "number like": r"""
class A:
    __float__ = lambda s: 1.0
    __int__ = __index__ = __round__ = lambda *_: 7
    __sub__=__rsub__=__add__=__radd__=__mul__=__rmul__=lambda *_: 0
""",
    "array interface": r"""
import ctypes
buf = ctypes.create_string_buffer(64)
class A:
    __array_interface__ = {'shape': (0,), 'typestr': '<f8', 'data': (0, False), 'version': 3}
    size = 1
    shape = ()
    ndim = 0
""",
    "array interface address": r"""
class A:
    __array_interface__ = {'shape': (1,), 'typestr': '<i8', 'data': (4096, False), 'version': 3}
""",
    "array method": r"""
class A:
    def __array__(self, *a, **k): return []
    __array_priority__ = 10**6
    __array_ufunc__ = None
""",
    "empty sequence": r"""
class A:
    size = 1
    def __len__(self): return 0
    def __getitem__(self, i): raise IndexError
    def __iter__(self): return iter(())
""",
    "changing length": r"""
class A:
    n = 0
    size = 2
    def __len__(self): A.n += 1; return A.n % 3
    def __getitem__(self, i): return 0
    def __iter__(self): return iter([0] * (A.n % 3))
""",
    "liar": r"""
class A:
    def __getattr__(self, n): return lambda *a, **k: True
    def __len__(self): return 2
    def __bool__(self): return True
    def __str__(self): return '7'
    def __hash__(self): return 0
    def __contains__(self, x): return True
""",
    "equal self": r"""
class A:
    def __eq__(self, o): return self
    __ne__ = lambda s, o: False
    __lt__ = __le__ = __gt__ = __ge__ = lambda *a: True
    __hash__ = lambda s: 0
""",
    "not implemented": r"""
A = lambda: NotImplemented
""",
    "ellipsis": r"""
A = lambda: ...
""",
    "range": r"""
A = lambda: range(0)
""",
    "memoryview": r"""
A = lambda: memoryview(b'')
""",
    "empty list": r"""
A = lambda: []
""",
    "empty tuple": r"""
A = lambda: ()
""",
    "empty dict": r"""
A = lambda: {}
""",
    "empty text": r"""
A = lambda: ''
""",
    "empty set": r"""
A = lambda: set()
""",
    "empty iterator": r"""
A = lambda: iter(())
""",
    "zero": r"""
A = lambda: 0
""",
    "minus zero": r"""
A = lambda: -0.0
""",
    "inf": r"""
A = lambda: float('inf')
""",
    "minus inf": r"""
A = lambda: float('-inf')
""",
    "nan": r"""
A = lambda: float('nan')
""",
    "complex nan": r"""
A = lambda: complex('nan')
""",
    "complex inf": r"""
A = lambda: complex('inf')
""",
    "decimal nan": r"""
from decimal import Decimal
A = lambda: Decimal('nan')
""",
    "decimal snan": r"""
from decimal import Decimal
A = lambda: Decimal('snan')
""",
    "decimal inf": r"""
from decimal import Decimal
A = lambda: Decimal('inf')
""",
    "decimal huge": r"""
from decimal import Decimal
A = lambda: Decimal('1e999999999')
""",
    "fraction huge": r"""
from fractions import Fraction
A = lambda: Fraction(10**9999, 3)
""",
    "pretend fraction": r"""
class A:
    __module__ = 'fractions'
    __str__ = lambda s: '1e30000000'
    numerator, denominator = 1, 0
A.__name__ = 'Fraction'
""",
    "pretend decimal": r"""
A = type('Decimal', (), {'__module__': 'decimal', 'as_tuple': lambda s: (0, (9,)*10**6, 10**18)})
""",
    "pretend deque": r"""
A = type('deque', (), {'__module__': 'collections', '__iter__': lambda s: iter(())})
""",
    "pretend numpy": r"""
A = type('A', (), {'__module__': 'numpy', 'tolist': lambda s: []})
""",
    "numpy nat": r"""
import numpy as np
A = lambda: np.datetime64('NaT')
""",
    "numpy nan": r"""
import numpy as np
A = lambda: np.nan
""",
    "numpy masked": r"""
import numpy as np
A = lambda: np.ma.masked_all(1)
""",
    "numpy masked constant": r"""
import numpy as np
A = lambda: np.ma.masked
""",
    "numpy empty": r"""
import numpy as np
A = lambda: np.zeros((0, 2))
""",
    "numpy void": r"""
import numpy as np
A = lambda: np.void(b'')
""",
    "numpy broadcasting": r"""
import numpy as np
A = lambda: np.zeros((0, 1))
""",
    "numpy bool": r"""
import numpy as np
A = lambda: np.True_
""",
    "str subclass": r"""
class A(str):
    __eq__ = lambda *a: True
    __hash__ = str.__hash__
    __str__ = __repr__ = __format__ = lambda *a: 'x'
""",
    "int subclass": r"""
class A(int):
    __eq__ = __le__ = __ge__ = lambda *a: True
    __sub__ = lambda *a: 0
    __hash__ = int.__hash__
    __int__ = lambda s: 3
""",
    "tuple subclass": r"""
class A(tuple):
    __eq__ = lambda *a: True
    __iter__ = lambda s: iter(())
    __len__ = lambda s: 2
""",
    "dict subclass": r"""
class A(dict):
    __missing__ = lambda s, k: k
    __eq__ = lambda *a: True
    __contains__ = lambda *a: True
    def items(self): return []
    def keys(self): return ['a']
    def __getitem__(self, k): return k
""",
    "defaultdict": r"""
from collections import defaultdict
A = lambda: defaultdict(lambda: True)
""",
    "enum": r"""
import enum
class E(enum.Enum):
    X = 1
    __eq__ = lambda *a: True
    __hash__ = lambda s: 0
A = lambda: E.X
""",
    "exception": r"""
A = lambda: AssertionError()
""",
    "exception class": r"""
A = lambda: AssertionError
""",
    "type": r"""
A = lambda: type
""",
    "mapping": r"""
class A:
    keys = lambda s: ['a']
    __getitem__ = lambda s, k: k
    items = lambda s: []
""",
    "dataclass eq": r"""
from dataclasses import dataclass
@dataclass(eq=False)
class A:
    x: int = 0
    __eq__ = lambda *a: True
    __hash__ = lambda s: 0
""",
    "generator of nothing": r"""
def A():
    return
    yield
""",
    "self iterator": r"""
class A:
    __iter__ = lambda s: s
    def __next__(self): raise StopIteration
""",
    "coroutine": r"""
async def A(): return 7
""",
    "context": r"""
class A:
    __enter__ = lambda s: s
    __exit__ = lambda *a: True
""",
}

RAISED = ["ZeroDivisionError", "ValueError", "IndexError", "KeyError", "AttributeError", "NotImplementedError"]
RAISED += ["RecursionError", "MemoryError", "AssertionError", "StopIteration", "type('E', (AssertionError,), {})"]
VALUES |= {f"raises {name}": f"def A(): raise {name}" for name in RAISED}

# These end the run or never end: nothing after them could be seen to fail.
LAST = ("decimal huge", "pretend fraction", "pretend decimal", "mapping")
