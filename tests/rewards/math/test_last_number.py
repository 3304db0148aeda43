"""The last number of a response. Every pair was decided by hand."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.grader import Grader
from delta_cli.rewards.math.last_number import last_number, number_reward
from delta_cli.rewards.verifiers import check_answers

FOUND = {
    "3 * 4 = 12. The answer is 12.": "12", "so 7": "7", "#### 18": "18", "18 eggs\n#### 9\nor was it 10?": "9",
    "#### 3\n#### 4": "4", "#### $1,234.50": "1234.50", "#### -3": "-3", "####5": "5",
    "It costs $70,000 in all": "70000", "The answer is -2": "-2", "x = -2": "-2", "= −2": "-2", "It is $-5": "-5",
    "It is -$5": "-5", "10 - 2 = 8": "8", "12/3 = 4": "4", "(8)": "8", "**8**": "8", "8 - which is right": "8",
    "5 apples": "5", "3/4": "3/4", "a 3 / 4 share": "3/4", "50%": r"50\%", "50 %": r"50\%", ".5": ".5",
    "0.50": "0.50", "2, 3 and 4": "4", "1.": "1", "x-axis, 4": "4", "a well-known 7": "7", "5 1/2": "11/2",
    r"\frac{3}{4}": "3/4", r"-\frac{3}{4}": "-3/4", "negative 10": "-10", "x = - 10": "-10", "= +10": "10",
    "is +10.": "10", "$x = 10$": "10", r"\(x = 10\)": "10", r"\[x=10\]": "10", r"\boxed{10}": "10",
    r"\boxed{x = 10}": "10", "The answer is $10$.": "10", "The answer is **10**.": "10",
    "**The answer is 10.**": "10", "It is *10*": "10", "10 (ten)": "10", "10 eggs": "10", "10 m": "10", "45°": "45",
    r"45^\circ": "45", r"The total is \$10.": "10", r"10\text{ cm}": "10", r"10\ \text{cm}": "10", "Answer: 10": "10",
    "Answer:10": "10", "Step 2: 10": "10", "So => 10": "10", r"\implies 10": "10", r"x \approx 10": "10",
    "10\n\n": "10", "10 — the answer": "10", "the answer — 10": "10", "at least 10 hours": "10", "about 10": "10",
    "(a) 10": "10", '"10"': "10", "She has (10 apples)": "10", "5 - 2 = 3 apples": "3", "10 minutes later": "10",
    "<think>5 or 6</think> so 6": "6", "</think>The answer is 10": "10", "The cost is 5 dollars and 10 cents": "10",
    "10 dollars.": "10", "$10 per hour": "10", "10 a day": "10", "1,000,000": "1000000",
    "10 eggs, which is right": "10", "Total = 5 + 5 = 10 apples.": "10", "is 10;": "10", "10 I think": "10",
    "10, I think": "10", "$$10$$": "10", "a total of 10": "10", "#### 18 and 19 more": "18", r"#### \$18": "18",
    "#### **18**": "18", "#### 1,000": "1000", "#### 3/4": "3/4", "#### -$5": "-5", "#### 5%": r"5\%",
    "So the final answer is:\n\n10": "10", "Final answer: 10.": "10", "The answer is therefore 10 km.": "10",
    "She earns $10 per hour.": "10", "so there are 10 ways": "10", "...which gives us 10": "10", "…= 10": "10",
    "x=10 and y=20": "20", "Therefore, $n = 10$.": "10", "The probability is 1/6": "1/6",
    r"The probability is \frac{1}{6}.": "1/6", r"The probability is $\dfrac{1}{6}$": "1/6", "Ans = 10": "10",
    "Ans. 10": "10", "that is, 10": "10", "(Answer: 10)": "10", "[10]": "10", "{10}": "10", "`10`": "10",
    "```\n10\n```": "10", "_10_": "10", "__10__": "10", "***10***": "10", "equals 10": "10", "equal to 10": "10",
    "comes to 10": "10", "adds up to 10": "10", "is 10% of it": r"10\%", "10 percent": r"10\%", "It is 0": "0",
    "It is -0.5": "-0.5", "= -.5": "-.5", "is €10": "10", "£10": "10", "= $1,000,000.00": "1000000.00",
    "#### 10\n\nHope that helps!": "10", "#### 10.": "10", "#### $10": "10", "####  -10": "-10",
    r"#### \frac{1}{2}": "1/2", "#### 10 apples": "10", "#### 10%": r"10\%", "\\[\n10\n\\]": "10", "$$\n10\n$$": "10",
    r"\text{The answer is } 10": "10", r"\text{Answer: 10}": "10", r"\boxed{\text{10}}": "10", r"\boxed{\$10}": "10",
    r"$\boxed{10}$.": "10", r"\textbf{10}": "10", r"\mathbf{10}": "10", r"x = \mathbf{10}": "10",
    r"\begin{align} x &= 10 \end{align}": "10", "10\\\\": "10", "is 10 degrees": "10", "90°.": "90", "10 s": "10",
    "10 hours and": "10", "10 students": "10", "The result: -10": "-10", "y = −10": "-10", "(-10)": "-10",
    "is (-10)": "-10", "-10": "-10", "−10": "-10", "\n-10": "-10", "We get 20 - 10 = 10": "10", "2+3=5": "5",
    "2^{10} = 1024": "1024", "f(3) = 10": "10", r"\sqrt{100} = 10": "10", "5! = 120": "120",
    "1 000 000 = 10^6 = 1000000": "1000000", "|-10| = 10": "10", "10 == 10": "10", "<answer>10</answer>": "10",
    "The answer is 10</s>": "10", "10<|im_end|>": "10", "She had 20 apples, gave 10 away, leaving 10": "10",
    "Total cost: $10.00": "10.00", "→ 10": "10", "⇒ x = 10": "10", "∴ 10": "10", "10 : done": "10", "10; done": "10",
    "It is 10?": "10", "Alice (10) wins": "10", "Note 10": "10", "I got 10, not more": "10", "I think it's 10": "10",
    "It’s 10": "10", "= 10 $": "10", r"10 \$": "10", "is ≈ 10": "10", "2/4": "2/4", "-2/4": "-2/4", "12 1/2": "25/2",
    "-1 1/2": "-3/2", "12.50": "12.50",
}  # fmt: skip
# Part of an expression, a word, a time, a range, a list; in doubt; or taken back.
NONE = [
    "", "none", "####", "#### twelve", "7 #### twelve", "3 + 4", "10 - 2", "10 -2", "3 * 4", "3 × 4", "3 x 4",
    "12 = 3*4", "2^3", "2 = ", "4 +", "x2", "at 10:30", "1,2,3", "12,5", "1.2.3", "1/2/3", "5kg", "1e3", "7th",
    "10-12", "2^{10}", r"5\cdot 10", "max(5, 10)", "10 hundred", "1 000", "f(10)", "2(10)", "sqrt(10)", "sqrt 10",
    r"\sqrt{10}", "x_{10}", "x_10", "2**10", "2 ** 10", "5*10", "5 *10", "10!", "10 factorial", "10 million",
    "10 thousand", "10²", "10½", "½", "10 x", "10x", r"10\pi", "10 π", "10 pi", "10^2", "10 squared", r"10\times 3",
    r"10\cdot x", "10 + x", "10 - x", "10-fold", "5 or 6 minus 10", "20 minus 10", "5 plus 10", "5 times 10",
    "5 divided by 10", "half of 10", "twice 10", "square root of 10", "3 out of 10", "(5, 10)", "[5, 10]", "{5, 10}",
    r"\{5,10\}", r"\boxed{5, 10}", "x > 10", "x < 10", "x >= 10", r"x \le 10", r"x \neq 10", "x != 10", "x ≠ 10",
    "±10", r"\pm 10", "5 ± 10", "5–10", "5 to 10", "from 5 to 10", "between 5 and 10", "more than 10", "less than 10",
    "not 10", "isn't 10", "10 is not the answer", "10 is wrong", "log 10", "log_2 10", r"\frac{x}{10}",
    r"\frac{10}{x}", "10/x", "x/10", "10 mod 7", "mod 10", "base 10", r"\binom{5}{10}", "5 choose 10", "|10|", "-10|",
    "10%5", "10 % 5", "5 10", "5, 000", "1, 000", "٣", "10 ٣", "10 ③", "--10", "- - 10", "- 10", "Answers:\n- 10",
    "10e", "10E5", "0x10", "#10", "10'000", "5 . 10", "10..5", r"\text{max}(10)", r"\gcd(5,10)", "gcd 10",
    r"\lfloor 10.5", "10 < x", "10 = x", r"10 \le x", r"10\text{ hundred}", r"10 \text{ million}", "10 dozen",
    "10 pairs", "10 and a half", "10 tenths", "10 quarters", "2 halves", "10 over 3", "10 to the power", "1010_2",
    "10_2", "10_{2}", "<think>10", "<think>10</think>", "see step 10", "(3+4) 10", r"\sin(x) 10", "f(x) 10", "x 10",
    "n 10", "two hundred 10", "ten to 10", "point 10", "(5; 10)", "10,5", "10 ,5", r"10\!5", "5 · 10", "5 ∙ 10",
    "5 ⋅ 10", "5 ∗ 10", "5 ÷ 10", "5 ∕ 10", "5⁄10 + x", "x\u206210", "10⁵", "10₂", "₁₀", "10 × 10ˣ", "10 ⁄ 3",
    "10 ∕ 3", "10 (x+1)", "10(x)", "10[x]", "$10x$", "10$x$", "$10$ hundred", "(10)(x)", "(10)x", "(10)^2", "(10)!",
    "[10]^2", r"\boxed{10}^2", r"\boxed{10}!", "{10}^3", "$10$!", "**10**!", "5 and 10/x", "x·10", "π10", "π 10",
    "e 10", "cos 10", "cos(10)", r"\cos 10", r"\cos{10}", r"\cos^2 10", r"\ln 10", "ln(10)", r"\log_{10} x",
    r"\log_{2} 10", "log₂ 10", "lg 10", "exp(10)", "e^10", "e^{10}", "10e^x", "10i", "10 i", "5 + 10i", "10j", "i10",
    "x_{1}10", "a10", "A10", "Q10", "v1.0.10", "IPv 10.0.0.1", "10.5.1", "3.14.15", "2024-01-10", "01/10/2024",
    "10:00 PM", "10 : 30", "5:10", "5 : 10", "10%x", "10‰", "10°30'", '10\'5"', "10ft", "10 choose k", "10th", "1st",
    "10 th", "10k", "10K", "10M", "10 k", "10bn", "10 bn", "10 thousandths", "ten-10", "x-10", "x -10", "n - 10",
    "5 − 10", "5 — 10", "5 – 10", "5 - 10", "5 -10", "5- 10", "5-10", "5+10", "5 +10", "5 + 10", "5+ 10", "5 ++ 10",
    "x+10", "(x+10)", "(x)10", "(5)10", "5(10)", "5 (10)", "5 [10]", "[5]10", r"\{10, 5\}", "{1, 10}", "<5, 10>",
    "⟨5, 10⟩", r"\langle 5, 10\rangle", "|5, 10|", "[1;10]", "(1,10)", "(1 , 10 )", "x in [1, 10]", "x ∈ {1, 10}",
    r"\min(1,10)", "lcm(4, 10)", r"\operatorname{lcm}(10)", r"\mathrm{max}(10)", r"\text{lcm}(10)",
    r"\sum_{k=1}^{10}", r"\sum_{k=1}^{10} k", r"\int_0^10", r"\int_{0}^{10}", r"\prod_{10}", r"\overline{10}",
    r"\not 10", r"\neg 10", "¬10", "!10", "≠10", r"\ne 10", r"\geq 10", r"\leq10", "<10", ">10", "≥ 10", "≤10",
    "=< 10", "=/= 10", "≢ 10", r"\approx\! 5 \cdot 10", "minus 10", "plus 10", "plus or minus 10", "times 10",
    "the square of 10", "the negative of 10", "the reciprocal of 10", "the inverse of 10", "10 is incorrect",
    "10 was wrong", "10 isn't right", "10 cannot be", "multiplied by 10", "divided by 10", "10 divided by three",
    "10 times two", "10 minus one", "10 plus one", "10 over two", "10 squared is", "10 cubed", "10-million",
    "10 hundred thousand", "10,000,00", "1,00", "1,0000", "0,10", "1.000,10", r"\frac{1}{10}x", r"\frac{1}{10} x",
    "1/10x", "1/10 x", r"\frac1{10}", r"\binom{10}{3}", r"\begin{pmatrix}5\\10\end{pmatrix}", "5 & 10", r"5 \\ 10",
    "5 | 10", "5 mod 10", "5 % 10", "5 ^ 10", "5^10", "5^ 10", "5 ** 10", "5**10", "5_10", "x#10", "@10", "&10",
    "10&", "10@", "10#", "10\\", r"10\foo", r"\foo 10", r"\foo10", r"\alpha10", r"10\alpha", r"\phantom{10}",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FOUND.items())
def test_the_number_that_is_the_answer(text: str, expected: str) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize("text", NONE)
def test_no_number_is_the_answer(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("gold", "response", "question", "right"),
    [
        ("18", "so 18.", "", True),
        ("18", "so 18.0", "", True),
        ("18", "18, no, 19", "", False),
        ("18", "#### 18 and 19 more", "", True),
        ("1234", "1,234", "", True),
        ("a long way #### 1,234", "1234", "", True),  # the gold as GSM8K writes it
        ("0.5", "1/2", "", True),
        ("4", "8/2", "", False),  # work that is left
        ("8/2", "4", "", True),
        ("50", "50%", "What percent is it?", True),
        ("50", "50%", "How many?", False),
        ("0.5", "50%", "", True),
        ("-3", "3", "", False),
        ("3", "", "", False),
        ("no number", "no number", "", False),
        ("5", "12,5", "", False),
        ("2", "10 - 2", "", False),
    ],
)
def test_verdicts(gold: str, response: str, question: str, right: bool) -> None:
    assert number_reward(response, gold, question) == right
    with Grader(Reward(kind="number")) as grader:
        verdict = grader.submit(response, Problem("p", question, gold), 3, False).result()
    assert (verdict.reward, verdict.correct, verdict.failure) == (float(right), right, None)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_are_what_they_are(gold: int, given: int) -> None:
    """Whole and with commas; another integer is another answer."""
    for text in (f"The answer is {given}.", f"#### {given:,}", f"that makes {given:,} apples"):
        assert number_reward(text, str(gold)) == (gold == given)
        assert number_reward(text, str(given)) == 1.0


@given(st.text(alphabet="0123456789.,/-−+*^= x$%#(){}\\\n", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    found = last_number(text)
    assert found is None or number_reward(text, found) in (0.0, 1.0)


HOSTILE = [
    "9" * 100_000, "1" + ",111" * 25_000 + ",", "1 " * 50_000, "(" * 99_999 + "1", "1" + ")" * 99_999,
    "-" * 99_999 + "1",
    "1" + "-" * 99_999, "1" + " " * 99_999, r"\frac{" * 16_000 + "1", "<think>" * 14_000 + "1",
    "1" + r"\text{" * 16_000,
    "1/" * 50_000, "#### " * 20_000 + "1", "." * 99_999 + "1", "1." * 50_000, "*" * 99_999 + "1", "1 1/1 " * 16_000,
    "$" * 99_999 + "1", " \n" * 50_000 + "1", "٣" * 100_000, "1" + "٣" * 99_999, "a " * 49_999 + "1",
    "#### " + "9" * 99_999,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:8] for text in HOSTILE])
def test_a_hundred_thousand_characters_take_little_time_and_never_raise(text: str) -> None:
    start = time.process_time()
    for gold in ("1", text, text[:5000]):
        number_reward(text, gold)
    assert time.process_time() - start < 0.5


def test_the_bonus_for_form_is_for_a_marked_number() -> None:
    with Grader(Reward(kind="number", format_bonus=0.25)) as grader:
        problem = Problem("p", "", "4")
        rewards = [grader.submit(text, problem, 1, False).result().reward for text in ("4", "#### 4", "#### 4 #### 4")]
    assert rewards == [1.0, 1.25, 1.0]


def test_a_gold_answer_without_a_number_is_refused_by_name() -> None:
    check_answers("number", [Problem("a", "", "7"), Problem("b", "", "... #### 1,000")])
    for answer in ("none", {"type": "stdio"}):
        with pytest.raises(UserError, match=r"problem 'c' of own: .*no number"):
            check_answers("number", [Problem("a", "", "7"), Problem("c", "", answer, "own")])
