"""Right answers in other words are accepted; near misses are not."""

from __future__ import annotations

import string
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_cli.rewards import math_reward

# Both tables are worked by hand: the gold answer, and what a response writes in its box.
SAME = [
    (r"5", r"x=5"),
    (r"x=5", r"5"),
    (r"5", r"5.0"),
    (r"5", r"5."),
    (r"1/2", r"\frac{1}{2}"),
    (r"1/2", r"\dfrac12"),
    (r"\frac{1}{2}", r"0.5"),
    (r"0.5", r"\tfrac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"1,234", r"1234"),
    (r"1234", r"1{,}234"),
    (r"1234", r"1\,234"),
    (r"1,234,567", r"1234567"),
    (r"\$1,234.50", r"1234.5"),
    (r"5", r"\$5"),
    (r"5", r"5 \text{ cm}"),
    (r"5\text{ cm}", r"5 cm"),
    (r"5 \text{ cm}^2", r"5\ \mathrm{cm^2}"),
    (r"5\mathrm{~km/h}", r"5 \text{ km/h}"),
    (r"5\mathrm{~km/h}", r"5 kilometers per hour"),
    (r"60^\circ", r"60"),
    (r"60^\circ", r"60^{\circ}"),
    (r"60^\circ", r"60 \text{ degrees}"),
    (r"60", r"60°"),
    (r"50\%", r"50\%"),
    (r"50\%", r"0.5"),
    (r"50\%", r"\frac12"),
    (r"0.5", r"50 \%"),
    (r"50\%", r"50 percent"),
    (r"1\frac{1}{2}", r"1.5"),
    (r"1\frac12", r"\frac32"),
    (r"3 1/2", r"3.5"),
    (r"(1,2)", r"(1, 2)"),
    (r"(1,2)", r"\left( 1, 2 \right)"),
    (r"[1,2)", r"\left[1,2\right)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"1,2", r"\{2,1\}"),
    (r"1, 2", r"2 \text{ and } 1"),
    (r"1, 2", r"x=1 \text{ or } x=2"),
    (r"\pm 2", r"-2, 2"),
    (r"\{-2,2\}", r"\pm 2"),
    (r"1\pm\sqrt{2}", r"1+\sqrt2, 1-\sqrt2"),
    (r"\sqrt{50}", r"5\sqrt2"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"x^2-1", r"(x-1)(x+1)"),
    (r"y=2x+1", r"2x - y + 1 = 0"),
    (r"y=2x+1", r"2x+1"),
    (r"f(x)=x^2", r"x^2"),
    (r"x^2+y^2=1", r"1 = x^2 + y^2"),
    (r"x>2", r"(2,\infty)"),
    (r"(2,\infty)", r"x > 2"),
    (r"-1<x\leq 2", r"(-1,2]"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2, \infty) \cup (-\infty, 1)"),
    (r"x \in [1,2]", r"[1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}1/2\\3\end{pmatrix}", r"\begin{pmatrix}0.5\\3\end{pmatrix}"),
    (r"\begin{pmatrix} \frac{1}{2} \\[4pt] 3 \end{pmatrix}", r"\begin{pmatrix}0.5\\3\end{pmatrix}"),
    (r"B", r"(B)"),
    (r"\text{(B)}", r"B"),
    (r"B", r"\textbf{B}"),
    (r"B", r"\text{B.}"),
    (r"\text{Evelyn}", r"Evelyn"),
    (r"\text{Yes}", r"yes"),
    (r"even", r"\text{even}"),
    (r"2^{10}", r"1024"),
    (r"\pi", r"pi"),
    (r"2\pi", r"6.283185"),
    (r"\frac{1}{3}", r"0.333333"),
    (r"\infty", r"+\infty"),
    (r"\sin^2 x+\cos^2 x", r"1"),
    (r"10^{-3}", r"0.001"),
    (r"1.2\times 10^{3}", r"1200"),
    (r"3", r"\frac{6}{2} = 3"),
    (r"101_2", r"101_{2}"),
    (r"2+3i", r"3i+2"),
    (r"\emptyset", r"\varnothing"),
    (r"-5", r"−5"),
    (r"5", r"{5}"),
    (r"5", r"$5$"),
    (r"5", r"\(5\)"),
    (r"x+1", r"1 + x"),
    (r"\frac{x^2-1}{x-1}", r"x+1"),
    (r"\binom{5}{2}", r"10"),
    (r"5!", r"120"),
    (r"|x|", r"\left|x\right|"),
    (r"\sqrt[3]{8}", r"2"),
    (r"8\text{ m}", r"8 \mathrm{m}"),
    (r"k\pi, k\in\mathbb{Z}", r"k\pi, k \in \mathbb{Z}"),
    (r"3^{2x}", r"9^x"),
    (r"\frac{x^2}{2}", r"x^2\frac{1}{2}"),
    (r"3 \pmod{7}", r"x \equiv 3 \pmod 7"),
    (r"3", r"3 \pmod 7"),
    (r"x^2(x+1)", r"x^3+x^2"),
    (r"A+B", r"B+A"),
]

NEAR_MISSES = [
    ("385", r"\sum_{k=1}^{10} k^2"),
    ("5", r"9^{9^{9^{9}}}"),
    (r"\frac{1}{2}", r"\int_0^1 x dx"),
    (r"3", r"3t"),
    (r"2t", r"2"),
    (r"5", r"5c"),
    (r"x^2+1=0", r"x^2+2=0"),
    (r"\text{AB}", r"BA"),
    (r"1,2", r"(1,2)"),
    (r"(1,2)", r"(2,1)"),
    (r"(1,2)", r"1,2"),
    (r"\{1,2\}", r"(2,1)"),
    (r"(1,2)", r"[1,2]"),
    (r"[1,2]", r"[1,2)"),
    (r"(1,2]", r"[1,2)"),
    (r"0.0000001", r"0"),
    (r"0.0000001", r"0.0000002"),
    (r"\frac{\sqrt2}{10^{20}}", r"\frac{\sqrt3}{10^{20}}"),
    (r"12", r"1 2"),
    (r"3", r"1 2"),
    (r"1000", r"1e3"),
    (r"5", r"3=5"),
    (r"50", r"50\%"),
    (r"50\%", r"50"),
    (r"5", r"5 hello world x"),
    (r"5", r"5 \text{ million}"),
    (r"5", r"5,6"),
    (r"5", r"5;6"),
    (r"5", r"5 \text{ or } 6"),
    (r"5", r"4, 5"),
    (r"5", r"x=5, x=3"),
    (r"5", r"-5"),
    (r"-5", r"5"),
    (r"\frac13", r"0.333"),
    (r"\frac13", r"0.33333"),
    (r"1/3", r"0.333334"),
    (r"\pi", r"3.14"),
    (r"\pi", r"22/7"),
    (r"\sqrt{2}", r"1.414"),
    (r"2.5", r"2.50001"),
    (r"2", r"2.0000001"),
    (r"2", r"1.9999999999"),
    (r"5", r""),
    (r"5", r"\text{the answer}"),
    (r"5", r"\text{What is } 2+3"),
    (r"What is 2+3", r"5"),
    (r"5\text{ m}", r"5\text{ cm}"),
    (r"5\text{ m}", r"5\text{ m}^2"),
    (r"\$5", r"5 cents"),
    (r"x", r"X"),
    (r"i", r"-i"),
    (r"\infty", r"-\infty"),
    (r"|x|", r"x"),
    (r"\pm 2", r"2"),
    (r"2", r"\pm 2"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\{1,2\}", r"\{1\}"),
    (r"\{1,1,2\}", r"\{1,2\}"),
    (r"x>2", r"x\ge 2"),
    (r"x>2", r"x<2"),
    (r"x>2", r"[2,\infty)"),
    (r"x=5", r"y=5"),
    (r"101_2", r"101_3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"A", r"B"),
    (r"A", r"A, B"),
    (r"A", r"AB"),
    (r"B", r"(B) or (C)"),
    (r"yes", r"no"),
    (r"yes", r"yes or no"),
    (r"even", r"neve"),
    (r"x^2", r"2x"),
    (r"x+y", r"x-y"),
    (r"f(x)=x^2", r"f(x)=x^3"),
    (r"2", r"2x"),
    (r"7", r"7!"),
    (r"2", r"2^1000"),
    (r"10", r"1\,0"),
    (r"1/2", r"2/1"),
    (r"1/2", r"1/-2"),
    (r"0", r"10^{-20}"),
    (r"10^{20}", r"10^{20}+1"),
    (r"9^{9^{2}}", r"9^{9^{2}}+1"),
    (r"3", r"3\pi"),
    (r"3", r"3\%"),
    (r"0.5", r".05"),
    (r"x", r"5"),
    (r"\sqrt{x^2}", r"x"),
    (r"5", r"5'"),
    (r"5", r"5^T"),
    (r"5", r"5_a"),
    (r"5", r"5\ldots"),
    (r"x", r"x\ldots"),
    (r"5", r"2(3)"),
    (r"6", r"2(3)"),  # work that is left to be done
    (r"24", r"2(3)(4)"),
    (r"108", r"99+9"),
    (r"108", r"99 + 9"),
    (r"1024", r"2^{10}"),
    (r"56", r"7 \times 8"),
    (r"0.5", r"\frac{1}{4}+\frac{1}{4}"),
    (r"0.333", r"0.333\ldots"),
    (r"12", '1"2'),
    (r"12", r"1\$2"),
    (r"y", r"y'"),
    (r"x+1", r"X+1"),
    (r"a+A", r"2a"),
    (r"\delta", r"\Delta"),
    (r"x^\frac{5}{2}", r"x^2\frac{1}{2}"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_same_answer_in_other_words(gold: str, answer: str) -> None:
    assert math_reward(rf"So the answer is \boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), NEAR_MISSES)
def test_near_miss_is_refused(gold: str, answer: str) -> None:
    assert math_reward(rf"So the answer is \boxed{{{answer}}}.", gold) == 0.0


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in SAME}))
def test_gold_is_an_answer_to_itself(gold: str) -> None:
    assert math_reward(rf"\boxed{{{gold}}}", gold) == 1.0
    assert math_reward(rf"\boxed{{{gold}}}", rf"$\boxed{{{gold}}}$") == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"first \boxed{4}, no: \boxed{5}", 1.0),
        (r"first \boxed{5}, no: \boxed{4}", 0.0),
        (r"both \boxed{4} and \boxed{5} and \boxed{6}", 0.0),
        (r"\fbox{5}", 1.0),
        (r"\boxed {5}", 1.0),
        (r"\boxed{4} \fbox{5}", 1.0),
        (r"\boxed{\boxed{5}}", 1.0),
        (r"\boxed{\frac{\boxed{5}}{2}}", 0.0),
        (r"\boxed{{5}}", 1.0),
        (r"} stray { braces \boxed{5} } {", 1.0),
        (r"$$x = \boxed{5}$$ Done.", 1.0),
        ("the answer is 5", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{ }", 0.0),
        (r"\boxed{5", 0.0),
        (r"\boxed{5} or rather \boxed{4", 0.0),
        (r"I will put it in \boxed as asked: \boxed{5}", 1.0),
        ("", 0.0),
    ],
)
def test_the_last_box_is_the_answer(response: str, reward: float) -> None:
    assert math_reward(response, "5") == reward


def test_a_two_megabyte_response_takes_linear_time() -> None:
    response = r"\boxed{" * 100_000 + "{" * 500_000 + "}" * 500_000
    assert math_reward(response, "5") == 0.0


def test_long_and_deep_answers_are_refused_unread() -> None:
    assert math_reward(r"\boxed{" + "9" * 1_000_000 + "}", "9") == 0.0
    assert math_reward(r"\boxed{" + "(" * 500 + "5" + ")" * 500 + "}", "5") == 0.0
    assert math_reward(r"\boxed{" + r"\frac{1}{" * 200 + "5" + "}" * 200 + "}", "5") == 0.0


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
@settings(max_examples=60, deadline=None)
def test_integers_are_equal_when_they_are(gold: int, answer: int) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", str(gold)) == float(answer == gold)
    assert math_reward(rf"\boxed{{{gold:,}}}", str(gold)) == 1.0
    assert math_reward(rf"\boxed{{{gold}.0}}", str(gold)) == 1.0


@given(st.integers(-500, 500), st.integers(1, 60), st.integers(-500, 500), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_fractions_are_equal_when_they_are(a: int, b: int, c: int, d: int) -> None:
    assert math_reward(rf"\boxed{{\frac{{{c}}}{{{d}}}}}", f"{a}/{b}") == float(Fraction(a, b) == Fraction(c, d))


@given(st.text(alphabet=string.printable + "\\{}^_$&%", max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_text_raises(text: str) -> None:
    if not {"!", "^", "*"} & set(text):  # those may take forever; the grader kills them
        assert math_reward(rf"\boxed{{{text}}}", "41") in (0.0, 1.0)


# Found by attack: each was accepted once, or refused though right.
ACCEPTED_ONCE = [
    (r"\frac{10}{3}\approx 3.33", "1=2"),
    (r"\frac{10}{3}\approx 3.33", "3"),
    (r"\frac{10}{3}\approx 3.33", r"\frac{10}{3}\approx 3.34"),
    (r"\frac{10}{3}\approx 3.33", "3.33_3"),
    (r"\pi\approx 3.14", r"e\approx 3.14"),
    ("3<5", "1<2"),
    (r"\frac{dy}{dx}=3x", "x=0"),
    (r"\frac{dy}{dx}", "0"),
    (r"\frac{dv}{dt}=9.8-0.5v", r"\frac{dv}{dt}=9.8-0.6v"),
    (r"3\frac{dv}{dt}=v", r"4\frac{dv}{dt}=v"),
    ("a=1, b=2", "2,1"),
    ("a=1, b=2", "a=2, b=1"),
    ("5", "5 quadrillion"),
    ("5", "5 lakh"),
    ("5", r"5 \text{ sixths}"),
    ("5", "5 wrong"),
    ("5", "5 dozen"),
    ("101", "101_2"),
    ("101_2", "101"),
    ("5", r"\max(4,5)"),
    ("10", r"\binom52"),
    ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("2x", r"\frac{d}{dx}x^2"),
    (r"\cos 70^\circ", r"\cos 70"),
    (r"\frac{\pi}{4}", r"\frac{\pi}{4}^\circ"),
    (r"x\in[1,2]", r"y\in[1,2]"),
    ("6", r"5\approx 6"),
    ("f(2)", "2f(1)"),
]
REFUSED_ONCE = [
    (r"\frac{10}{3}\approx 3.33", r"\frac{10}{3}"),
    (r"\frac{10}{3}\approx 3.33", "3.33"),
    (r"x=\frac{10}{3}\approx 3.33", r"\frac{10}{3}"),
    (r"\frac{10}{3}", r"x=\frac{10}{3}\approx 3.33"),
    ("a=1, b=2", "b=2, a=1"),
    ("a=1, b=2", "1,2"),
    (r"\frac{dy}{dx}=3x", "3x"),
    (r"\frac{dy}{dx}=3x", "dy/dx = 3x"),
    ("11", "x=5+5+1=11"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    ("19, 46, 82", r"19, 46, \text{ and } 82"),
    (r"\frac{NO}{BO}=\frac{1}{2}", r"\frac{1}{2}"),
    (r"\frac{4}{11}", r"0.\overline{36}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]"),
]


@pytest.mark.parametrize(("gold", "answer"), ACCEPTED_ONCE)
def test_what_attacks_found_is_refused(gold: str, answer: str) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", gold) == 0.0


@pytest.mark.parametrize(("gold", "answer"), REFUSED_ONCE)
def test_what_was_refused_though_right_is_accepted(gold: str, answer: str) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "question", "reward"),
    [
        ("18", r"18 \text{ eggs}", "How many eggs are left?", 1.0),
        ("18", "18 eggs", "How many eggs are left?", 1.0),
        ("54", r"54 \text{ points}", "How many points did Jojo score?", 1.0),
        ("18", "18 eggs", "How many ducks are left?", 0.0),
        ("18", "18 dozen eggs", "How many eggs are in a dozen?", 0.0),
        ("12 apples", "12", "How many apples?", 1.0),
        ("12 apples", "12 pears", "How many apples and pears?", 0.0),
        ("5", "5 wrong", "How many answers are wrong?", 0.0),
        (r"28\%", "28", "What percent is it?", 1.0),
        ("28", r"28\%", "What percentage is it?", 1.0),
        (r"28\%", "28", "What share is it?", 0.0),
        (r"28\%", "0.28", "What percent is it?", 1.0),
        ("28", "0.28", "What percent is it?", 0.0),
    ],
)
def test_words_of_the_question_are_what_is_counted(gold: str, answer: str, question: str, reward: float) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", gold, question) == reward
