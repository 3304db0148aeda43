r"""Which box of a response is its answer: the last one that a reader sees, and only a whole one."""

from __future__ import annotations

import time

import pytest

from delta_cli.rewards.math.boxed import last_box

ANSWERS = [
    (r"first \boxed{4}, no: \boxed{5}", "5"), (r"\boxed{5}, \boxed{6}", "6"), (r"\boxed {5}", "5"), (r"\fbox{5}", "5"),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"), (r"\boxed{}", ""), (r"} stray { braces \boxed{5} } {", "5"),
    # thinking
    (r"<think>\boxed{5}</think> so \boxed{6}", "6"), (r"\boxed{6}<think>\boxed{5}", "6"),
    # hidden text, comments, and percent signs in prose
    (r"\boxed{6}\phantom{\boxed{5}}", "6"), (r"\boxed{6} % \boxed{5}", "6"), ("% so \\boxed{5}\n\\boxed{6}", "6"),
    ("which is 50% of it, so \\boxed{5}", "5"), (r"50\% so \boxed{5}", "5"), ("growth in % is \\boxed{5}", "5"),
    (r"$\boxed{50}$%.", "50"), (r"\boxed{50}%", "50"), (r"\boxed{50%}", "50%"), (r"\textcolor{red}{\boxed{5}}", "5"),
    # around a box
    ("Answer:\n- \\boxed{5}", "5"), ("- $\\boxed{5}$", "5"), (r"**\boxed{5}**", "5"), (r"$$x = \boxed{5}$$ Done.", "5"),
    (r"\boxed{5}^\circ", "5"), (r"\boxed{5}\text{ cm}", "5"), (r"\boxed{5} cm", "5"), (r"\boxed{5}!", "5"),
    (r"\[\boxed{5}\]", "5"), (r"\underline{\boxed{5}}", "5"), (r"\text{so }\boxed{5}", "5"),
    (r"\boxed{5} - which", "5"),
    (r"the answer — \boxed{5}", "5"), (r"the answer - \boxed{5}", "5"), (r"\$\boxed{5}", "5"),
    (r"\left(\boxed{5}\right)", "5"),
    (r"x^{2} = {\boxed{5}}", "5"),
]  # fmt: skip
NO_ANSWER = [
    "", "5", r"\boxed{5", r"\boxed{5} or rather \boxed{4", r"<think>\boxed{5}</think> so 6", r"\boxed{5}</think> so 6",
    r"<think>\boxed{5}", r"<thinking>\boxed{5}</thinking>", r"\phantom{\boxed{5}}", r"\hphantom{x\boxed{5}}",
    "% \\boxed{5}", "5 % \\boxed{5}", "<!-- \\boxed{5} -->", r"\begin{comment}\boxed{5}\end{comment}",
    r"\cancel{\boxed{5}}", r"\sout{\boxed{5}}", r"~~\boxed{5}~~",
    r"-\boxed{5}", r"x=-\boxed{5}", r"x = - \boxed{5}", r"$-\boxed{5}$", r"( -\boxed{5})", r"2+\boxed{5}",
    r"2 + \boxed{5}",
    r"\frac{\boxed{5}}{2}", r"\frac{2}{\boxed{5}}", r"\sqrt{\boxed{5}}", r"\sqrt[3]{\boxed{5}}", r"2^{\boxed{5}}",
    r"\boxed{5}^2", r"\boxed{5}\pi", r"\boxed{5}+1", r"\boxed{5} + 1", r"x \neq \boxed{5}", r"\not\boxed{5}",
    r"2\cdot\boxed{5}", r"3/\boxed{5}",
]  # fmt: skip


@pytest.mark.parametrize(("response", "answer"), ANSWERS)
def test_the_answer_is_the_last_visible_box(response: str, answer: str) -> None:
    assert last_box(response) == answer


@pytest.mark.parametrize("response", NO_ANSWER)
def test_a_hidden_unfinished_or_partial_box_is_no_answer(response: str) -> None:
    assert last_box(response) is None


HOSTILE = [
    r"\boxed{" * 14_000, r"\boxed{5}" + "%" * 99_999, "{" * 50_000 + r"\boxed{5}" + "}" * 49_000,
    "<!--" * 25_000 + r"\boxed{5}",
    r"\phantom{" * 11_000 + r"\boxed{5}" + "}" * 11_000, r"\boxed{5}" + " " * 99_990, "$ " * 50_000 + r"\boxed{5}",
    r"\begin{comment}" * 6_000 + r"\boxed{5}", r"\boxed{5}" * 11_000, "}" + " " * 99_980 + r"\boxed{5}%",
    r"\sqrt[" * 16_000 + r"\boxed{5}", r"\iffalse" * 12_000 + r"\boxed{5}", "<think>" * 14_000 + r"\boxed{5}",
]  # fmt: skip


@pytest.mark.parametrize("response", HOSTILE, ids=[text[:8] for text in HOSTILE])
def test_finding_it_takes_linear_time(response: str) -> None:
    start = time.process_time()
    last_box(response)
    assert time.process_time() - start < 0.3
