from pathlib import Path

import pytest
from make_tiny_base import write_tokenizer

from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt, opened_think, render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(str(folder))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "1+{1}=?"),
        (
            "paper",
            "User:\n1+{1}=?\nPlease reason step by step, and put your final answer within \\boxed{}.\n\nAssistant:\n",
        ),
        ("chat", "1+{1}=?\n"),
        ("chat_boxed", "1+{1}=?\nPlease reason step by step, and put your final answer within \\boxed{}.\n"),
        ("Q: {question} {other} \\boxed{}", "Q: 1+{1}=? {other} \\boxed{}"),
    ],
)
def test_templates(tokenizer: Tokenizer, template: str, expected: str) -> None:
    assert render(template, "1+{1}=?", tokenizer) == expected
    ids = encode_prompt(Problem("0", "1+{1}=?", "2"), template, tokenizer)
    assert tokenizer.decode(ids) == expected


def test_a_template_without_the_question_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="'papper' is none of plain, two_shot, paper, chat"):
        render("papper", "1+1", tokenizer)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("User: hi\nAssistant: <think>\n", "<think>\n"),
        ("User: hi\nAssistant: <think>", "<think>"),
        ("User: hi\nAssistant: <think>\n\n</think>\n\n", ""),
        ("User: what is <think> for?\nAssistant: ", ""),
        ("User: hi\nAssistant: ", ""),
    ],
)
def test_a_template_that_opens_the_reasoning(prompt: str, expected: str) -> None:
    assert opened_think(prompt) == expected
