"""Finding equations in running text: only whole ones, checked exactly and at little cost."""

from __future__ import annotations

import time

import pytest

from delta_cli.rewards.equations import find_equations

# Checked by hand: the equations in each text; ✗ marks those that do not hold.
FOUND = {
    r"7+8=15 4+3+1=8 \boxed{85}": ["7+8=15", "4+3+1=8"],
    "7+8=14 4+3+1=8": ["7+8=14✗", "4+3+1=8"],
    "----7+8=15 ----4+3+1=9": ["7+8=15", "4+3+1=9✗"],
    "- 3+4=7\n- 2+2=5": ["3+4=7", "2+2=5✗"],
    "-7+8=1": ["-7+8=1"],
    "-7+8=15": ["7+8=15"],
    "Step 2: 3 + 4 = 8.": ["3 + 4 = 8✗"],
    "x = 3+4 = 7": ["3+4 = 7"],
    "12 * 3 = 36 apples": ["12 * 3 = 36"],
    "(1+2)*3=9 and 3(4)=11": ["(1+2)*3=9", "3(4)=11✗"],
    "1,000+500=1,500": ["1,000+500=1,500"],
    r"1{,}000\times 2 = 2{,}000": [r"1{,}000\times 2 = 2{,}000"],
    r"$\frac{1}{2}+\frac{1}{3}=\frac{5}{6}$": [r"\frac{1}{2}+\frac{1}{3}=\frac{5}{6}"],
    r"\dfrac{1}{2}+\frac{1}{3}=\frac{2}{5}": [r"\dfrac{1}{2}+\frac{1}{3}=\frac{2}{5}✗"],
    r"2\sqrt{3}\cdot\sqrt{3}=6": [r"2\sqrt{3}\cdot\sqrt{3}=6"],
    r"\sqrt{8}=2\sqrt{2}": [r"\sqrt{8}=2\sqrt{2}"],
    r"\sqrt{8}=3\sqrt{2}": [r"\sqrt{8}=3\sqrt{2}✗"],
    "2/3=0.67": ["2/3=0.67"],
    "2/3=0.65": ["2/3=0.65✗"],
    "2^{10}=1024, 2^10=1025": ["2^{10}=1024", "2^10=1025✗"],
    r"3 \times 4 = 12 \text{ cm}": [r"3 \times 4 = 12"],
    "10-2*-3=16": ["10-2*-3=16"],
}
# Skipped: parts of something larger, unknowns, words, ambiguous text. No verdict is better than a wrong one.
PASSED_OVER = [
    "x+7=12", "12x=24x", "5=x+3=8", "f(3)=9", "5 mod 3 = 2", "13/4 = 3 remainder 1", r"\sin 30 = 0.5+0", "3+4=7+x",
    r"x \cdot 7 + 1 = 22", "x - 3+4=1", "20%*50=10", "5! = 100+20", "3 + 5 = 8%", "1/0=1+1", "7+8=15 -4+3+1=8",
    "18 = 6", "|-3|=3+0", "a_1+2=3", "$5 + $3 = $8", "",
]  # fmt: skip


@pytest.mark.parametrize("text", FOUND)
def test_found(text: str) -> None:
    """Finds every equation with its verdict and position."""
    found = find_equations(text)
    assert [each.text + ("" if each.holds else "✗") for each in found] == FOUND[text]
    assert all(text[each.start : each.stop] == each.text for each in found)


@pytest.mark.parametrize("text", PASSED_OVER)
def test_passed_over(text: str) -> None:
    """Finds nothing."""
    assert find_equations(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}=1+1", "10**10**10=3+1", "2^(9999999)=1+1", "9^" * 2000 + "9=3+1", "(" * 2000 + "=1+1",
        "1+" * 3000 + "=3", "1=1+" * 500, "1" * 50_000 + "=1+1", "1" + " " * 20_000 + "=", r"\frac{" * 3000,
        r"\sqrt{2}" * 1000 + "=1", "0^{-1}=1+1", r"\sqrt{99999999999999999999999999999999999999999}=1+1",
    ],
)  # fmt: skip
def test_hostile_text_costs_little(text: str) -> None:
    """Towers of powers, endless brackets and endless numbers are refused quickly, not computed."""
    start = time.process_time()
    assert find_equations(text) == ()
    assert time.process_time() - start < 2.0
