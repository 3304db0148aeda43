"""Programs with their tests, and the reward that each must get."""

from __future__ import annotations

# Name: the program, its tests, and what it is worth.
PROGRAMS: dict[str, tuple[str, str, float]] = {
    "fraction": (
        """
from fractions import Fraction
def f(a,b): return Fraction(a,b)
""",
        """
from fractions import Fraction
assert f(1,3)==Fraction(1,3)
""",
        1.0,
    ),
    "fraction wrong": (
        """
from fractions import Fraction
def f(a,b): return Fraction(a,b+1)
""",
        """
from fractions import Fraction
assert f(1,3)==Fraction(1,3)
""",
        0.0,
    ),
    "dataclass": (
        """
from dataclasses import dataclass
@dataclass
class P:
    x:int
    y:int=0
def f(a): return P(a,a)
""",
        """
assert f(2)==P(2,2)
assert f(2).x==2
assert [f(1)]==[P(x=1,y=1)]
""",
        1.0,
    ),
    "dataclass wrong": (
        """
from dataclasses import dataclass
@dataclass
class P:
    x:int
    y:int=0
def f(a): return P(a,0)
""",
        """
assert f(2)==P(2,2)
""",
        0.0,
    ),
    "dataclass cheat": (
        """
from dataclasses import dataclass
@dataclass
class P:
    def __init__(self,*a): pass
def f(a): return P()
""",
        """
assert f(2)==P(2,2)
""",
        0.0,
    ),
    "dataclass cheat2": (
        """
from dataclasses import dataclass
@dataclass
class P:
    x:int
    y:int
    def __init__(self,*a): self.x=self.y=0
    __eq__=lambda *a: True
def f(a): return P()
""",
        """
assert f(2)==P(2,2)
""",
        0.0,
    ),
    "callback": (
        """
def apply(g,x): return g(x)
""",
        """
assert apply(lambda v: v+1, 3)==4
""",
        1.0,
    ),
    "callback map": (
        """
def ap(g,xs): return [g(x) for x in xs]
""",
        """
seen=[]
assert ap(seen.append,[1,2])==[None,None]
assert seen==[1,2]
""",
        1.0,
    ),
    "callback wrong": (
        """
def apply(g,x): return x
""",
        """
assert apply(lambda v: v+1, 3)==4
""",
        0.0,
    ),
    "own exc": (
        """
class Bad(ValueError): pass
def f(x):
    if x<0: raise Bad('neg')
    return x
""",
        """
try:
    f(-1)
    assert False
except Bad as e:
    assert str(e)=='neg'
""",
        1.0,
    ),
    "own exc pytest": (
        """
class Bad(ValueError): pass
def f(x):
    if x<0: raise Bad('neg')
    return x
""",
        """
import pytest
def test_x():
    with pytest.raises(Bad, match='neg'):
        f(-1)
""",
        1.0,
    ),
    "own exc not raised": (
        """
class Bad(ValueError): pass
def f(x): return x
""",
        """
import pytest
def test_x():
    with pytest.raises(Bad):
        f(-1)
""",
        0.0,
    ),
    "tests exc": (
        """
def retry(g,n):
    for i in range(n):
        try: return g()
        except Exception as e: last=e
    raise last
""",
        """
class Boom(Exception): pass
def bad(): raise Boom('x')
try:
    retry(bad,2)
    assert False
except Boom as e:
    assert str(e)=='x'
""",
        1.0,
    ),
    "tests exc class arg": (
        """
def retry(g,kinds):
    try: return g()
    except kinds: return 'caught'
""",
        """
class Boom(Exception): pass
def bad(): raise Boom('x')
assert retry(bad,Boom)=='caught'
""",
        1.0,
    ),
    "class math": (
        """
class math: isclose = staticmethod(lambda *a: True)
def f(x): return 7
""",
        """
assert math.isclose(f(1), 2.5)
""",
        0.0,
    ),
    "real math": (
        """
import math
def f(x): return 2.5
""",
        """
assert math.isclose(f(1), 2.5)
""",
        1.0,
    ),
    "from math": (
        """
from math import isclose
def f(x): return 2.5
""",
        """
assert isclose(f(1), 2.5)
""",
        1.0,
    ),
    "own isclose": (
        """
def isclose(*a): return True
def f(x): return 3
""",
        """
assert isclose(f(1), 2.5)
""",
        0.0,
    ),
    "stopiteration": (
        """
def f(x): raise StopIteration
""",
        """
assert all(map(f,[1,2]))
""",
        0.0,
    ),
    "stopiteration2": (
        """
def f(x): raise StopIteration
""",
        """
for y in map(f,[1,2]):
    assert y==3
""",
        0.0,
    ),
    "mutated": (
        """
def f(x):
    x.clear(); return []
""",
        """
items=[3,1]
assert f(items)==sorted(items)
""",
        0.0,
    ),
    "in place": (
        """
def f(x):
    x.sort()
""",
        """
items=[3,1]
f(items)
assert items==[1,3]
""",
        1.0,
    ),
    "exit": (
        """
import os
def f(x): os._exit(0)
""",
        """
try:
    f(-1)
    assert False
except Exception:
    pass
""",
        0.0,
    ),
    "exit after what passes": (
        """
import os
def f(x):
    if x < 0: os._exit(0)
    return x
""",
        """
assert f(1) == 1
try:
    f(-1)
    assert False
except Exception:
    pass
""",
        0.0,
    ),
    "generator": (
        """
def f(n):
    yield from range(n)
""",
        """
assert list(f(3))==[0,1,2]
assert sum(f(4))==6
""",
        1.0,
    ),
    "empty loop": (
        """
def f(n): return []
""",
        """
for x in f(3):
    assert x>0
""",
        0.0,
    ),
    "all methods": (
        """
class S:
    def twoSum(self,a,b): return a+b
""",
        """
s=S()
assert s.twoSum(1,2)==3
""",
        1.0,
    ),
    "deque": (
        """
from collections import deque
def f(): return deque([1])
""",
        """
from collections import deque
assert f()==deque([1])
""",
        1.0,
    ),
    "decimal": (
        """
from decimal import Decimal
def f(): return Decimal('1.1')
""",
        """
from decimal import Decimal
assert f()==Decimal('1.1')
""",
        1.0,
    ),
    "typing": (
        """
from typing import List
def f(x: List[int]): return x
""",
        """
x: List[int] = [1]
assert f(x)==[1]
""",
        1.0,
    ),
}
