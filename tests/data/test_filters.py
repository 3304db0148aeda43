import pytest

from delta_cli.data.filters import Filter
from delta_cli.errors import UserError

ROW = {"difficulty": 6.5, "topic": "Algebra", "level": "5", "extra": {"index": 3}, "gone": None, "tags": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("difficulty >= 5", True),
        ("difficulty >= 5 and topic != 'Algebra'", False),
        ("not difficulty < 5 or topic == 'x'", True),
        ("5 <= difficulty < 6.5", False),
        ("topic in ['Algebra', 'Geometry']", True),
        ("topic not in ('Algebra', 'Geometry')", False),
        ("'a' in tags", True),
        ("level >= 5", True),  # text of a number, as in CSV
        ("5 > level", False),
        ("level == 5", True),
        ("level > -1", True),
        ("extra.index == 3", True),
        ("extra.nothing == 3", False),
        ("gone >= 0", False),
        ("gone == None", True),
        ("missing == None", True),
        ("tags", True),
    ],
)
def test_conditions(text: str, met: bool) -> None:
    assert Filter(text)(ROW) is met


def test_fields_are_the_columns() -> None:
    assert Filter("a.b > 1 and c in [d, 2]").fields == {"a", "c", "d"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "difficulty >=",
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "[x for x in tags]",
        "tags[0] == 'a'",
        "difficulty ** 99 ** 99",
        "f'{topic}'",
        "difficulty = 5",
        "(" * 10_000,
        "topic is None",
    ],
)
def test_anything_else_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.filter"):
        Filter(text)


@pytest.mark.parametrize("text", ["topic > 5", "5 in difficulty"])
def test_what_cannot_be_compared_is_named(text: str) -> None:
    with pytest.raises(UserError, match="cannot compare"):
        Filter(text)(ROW)


def test_a_text_that_is_no_number_cannot_be_negative() -> None:
    assert Filter("-level > -3")({"level": "2"})
    with pytest.raises(UserError, match="'hard' in '-level' is not a number"):
        Filter("-level > 3")({"level": "hard"})
