"""Local files of every kind: what is kept, what is left out and counted, and how broken ones are named."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tokenizers
from make_tiny_base import write_tokenizer
from pyarrow import parquet

from delta_cli.assets import model_path
from delta_cli.data.load_report import LoadedData, LoadReport
from delta_cli.data.loading import load_problems
from delta_cli.data.prompts import dropped_turns, render_problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe.data import DataSection

Rows = list[dict[str, Any]]
ROWS: Rows = [
    {"question": "1+1?", "answer": "2", "level": 1},
    {"question": " 1+1? ", "answer": "2", "level": 1},
    {"question": "", "answer": "2", "level": 1},
    {"question": "2+2?", "answer": None, "level": 2},
    {"question": "2+3?", "answer": "  ", "level": 2},
    {"question": "3+3?", "answer": "6", "level": 3},
    {"question": "much too long a question for the limit", "answer": "7", "level": 3},
    {"question": "4+4?", "answer": "8", "level": 9},
]


def load(source: object, tokenizer: Tokenizer | None = None, longest: int | None = None, **keys: Any) -> LoadedData:
    """The problems of ``[data]`` with these keys, none held out unless asked for."""
    data = DataSection(source=str(source), **({"held_out": 0.0, "template": "plain"} | keys))
    return load_problems(data, 0, tokenizer, longest)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")


def write_gzip(path: Path, rows: Rows) -> None:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


def write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps({"version": 1, "data": rows}), encoding="utf-8-sig")


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: Rows) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".jsonl": write_jsonl,
    ".jsonl.gz": write_gzip,
    ".json": write_json,
    ".csv": write_csv,
    ".parquet": write_parquet,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(str(folder))


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_problems_and_account(
    tmp_path: Path, tokenizer: Tokenizer, suffix: str
) -> None:
    file = tmp_path / f"data{suffix}"
    WRITERS[suffix](file, ROWS)
    loaded = load(file, tokenizer, 20, filter="level < 5")
    assert [(p.id, p.question, p.answer) for p in loaded.problems] == [("1", "1+1?", "2"), ("6", "3+3?", "6")]
    assert loaded.report == LoadReport(read=8, kept=2, filtered=1, empty=1, without_gold=2, duplicated=1, too_long=1)
    assert str(loaded.report) == (
        "2 problems of 8 rows; left out: 1 excluded by data.filter, 1 without a question, "
        "2 without a gold answer, 1 with the question of an earlier row, 1 with too long a prompt"
    )


def test_the_prompt_is_measured_with_its_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "data.jsonl"
    write_jsonl(file, [{"question": "1234", "answer": 1}])
    assert load(file, tokenizer, 4).report.kept == 1
    with pytest.raises(UserError, match=r"no problem is left .*1 with too long a prompt"):
        load(file, tokenizer, 4, template="chat")


def test_fields_may_have_other_names_and_answers_other_forms(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    tests = {"type": "asserts", "code": "assert f(1) == 2"}
    rows = [
        {"ask": {"text": "a"}, "gold": 7},
        {"ask": {"text": "b"}, "gold": 0.5},
        {"ask": {"text": "c"}, "gold": tests},
        {"ask": {"text": "d"}, "gold": True},
        {"ask": {"text": "e"}, "gold": [1]},
        {"ask": {"text": "f"}},
        {"ask": {"text": [{"role": "system", "content": "s"}, {"role": "user", "content": "g"}]}, "gold": "8"},
    ]
    write_jsonl(file, rows)
    loaded = load(file, question="ask.text", answer="gold")
    assert [(p.question, p.answer) for p in loaded.problems] == [("a", "7"), ("b", "0.5"), ("c", tests), ("g", "8")]
    assert loaded.report.without_gold == 3


def test_an_answer_pattern_takes_the_last_match(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [
        {"question": "a", "answer": "first #### 3\nthen\n#### 1,200"},
        {"question": "b", "answer": "no mark"},
    ]
    write_jsonl(file, rows)
    loaded = load(file, layout="openai/gsm8k")
    assert [p.answer for p in loaded.problems] == ["1,200"]
    assert loaded.report.without_gold == 1
    own = load(file, answer_pattern=r"(\w+) #### \d")
    assert [p.answer for p in own.problems] == ["first"]


def test_limit_and_held_out_are_a_seeded_choice_in_order(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    write_jsonl(file, [{"question": f"q{i:03}", "answer": "1"} for i in range(100)])
    data = DataSection(source=str(file), limit=40, held_out=0.25)
    loaded = load_problems(data, seed=3)
    names = [[p.question for p in part] for part in (loaded.problems, loaded.held_out)]
    assert [len(part) for part in names] == [30, 10]
    assert all(part == sorted(part) for part in names)
    assert not set(names[0]) & set(names[1])
    assert load_problems(data, seed=3) == loaded
    assert load_problems(data, seed=4).problems != loaded.problems
    assert names[0] != [f"q{i:03}" for i in range(30)]


def test_arithmetic_needs_no_file() -> None:
    loaded = load_problems(DataSection(limit=200, held_out=0.1), seed=1)
    assert (len(loaded.problems), len(loaded.held_out)) == (180, 20)
    assert not {p.id for p in loaded.problems} & {p.id for p in loaded.held_out}
    assert str(loaded.report) == "200 problems of 200 rows"


@pytest.mark.parametrize("source", ["arithmetic", "word_problems"])
@pytest.mark.parametrize("name", ["filter", "question", "answer", "answer_pattern", "layout", "config", "split"])
def test_what_generated_problems_have_not_is_refused(source: str, name: str) -> None:
    """A filter that left nothing out would look like one that did."""
    with pytest.raises(UserError, match=rf"^data\.{name}: .* {source} are generated and have no fields; remove it$"):
        load(source, limit=9, **{name: "x"})


GOOD = b'{"question": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", GOOD + b"{oops\n", r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", GOOD + b"[1, 2]\n", r"a\.jsonl:2: holds a list, not an object"),
        ("a.jsonl", GOOD + b'{"question": "\xff"}\n', r"a\.jsonl:2: not JSON in UTF-8"),
        ("a.jsonl", GOOD + b"[" * 100_000, r"a\.jsonl:2: not "),
        ("a.jsonl", b'{"problem": "a", "answer": "1"}\n', r"a\.jsonl:1: no column 'question'; the columns are problem"),
        ("a.jsonl", b"", "a.jsonl: holds no rows"),
        ("a.jsonl.gz", GOOD, "cannot be read"),
        ("a.jsonl.gz", gzip.compress(50 * GOOD, mtime=0)[:-12], "cannot be read"),
        ("a.json", b'{"question": "a"}', "holds no list of records"),
        ("a.json", b"[1]", "record 1: holds a int"),
        ("a.csv", b"question,answer\na,1\nb\n", r"a\.csv:3: not as many cells"),
        ("a.csv", b"question,answer\na,1\nb,2,3\n", r"a\.csv:3: not as many cells"),
        ("a.csv", b'question,answer\na,1\n"b\n', r"a\.csv:\d: not a CSV row"),
        ("a.csv", b"question,answer\n\xff,1\n", r"a\.csv:\d: not a CSV row in UTF-8"),
        ("a.parquet", b"PAR1 not really", "not a readable Parquet file"),
        ("a.txt", GOOD, "unknown kind of file"),
    ],
)
def test_malformed_files_are_one_line_that_says_where(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"source": "nowhere.jsonl"}, "no such file"),
        ({"source": "./nowhere"}, "no such file or folder"),
        ({"limit": 48, "held_out": 0.999999}, r"data\.held_out = 0.999999 of 48 problems leaves none to train on"),
        ({"source": "a.jsonl", "layout": "openai/gsm9k"}, "'openai/gsm9k' is not a known data set"),
        ({"source": "a.jsonl", "answer_pattern": "("}, r"data\.answer_pattern"),
        ({"source": "a.jsonl", "answer_pattern": "#+ .*"}, "has no group"),
        ({"source": "a.jsonl", "filter": "f("}, r"data\.filter"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load(**({"source": "arithmetic"} | values))


def test_an_answer_that_is_not_finite_is_none(tmp_path: Path) -> None:
    lines = [
        f'{{"question": "{i}?", "answer": {gold}}}' for i, gold in enumerate(["NaN", "Infinity", "-Infinity", "5"])
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    loaded = load(tmp_path / "data.jsonl")
    assert [problem.answer for problem in loaded.problems] == ["5"]
    assert loaded.report.without_gold == 3


def test_half_a_character_is_named_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1?", "answer": "1"}\n{"question": "a\\ud800", "answer": "1"}')
    with pytest.raises(UserError, match=r"data.jsonl:2: character 2 .*U\+D800"):
        load(tmp_path / "data.jsonl")


def test_a_huge_row_is_not_encoded(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(
        tmp_path / "data.jsonl", [{"question": "1" * 10**6, "answer": "1"}, {"question": "1+1?", "answer": "2"}]
    )
    encoded: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **more: (encoded.append(len(text)), encode(self, text, **more))[1]
    )
    loaded = load(tmp_path / "data.jsonl", tokenizer, 20)
    assert (loaded.report.kept, loaded.report.too_long) == (1, 1)
    assert max(encoded) < 1000


def test_further_columns_reach_the_template_and_the_problem(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+{n} {{unit}}?", "answer": str(2 * n), "unit": "kg", "rubric": {"n": n}} for n in (1, 2)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(source=str(tmp_path / "data.jsonl"), columns=("unit", "rubric"), held_out=0.0)
    problems = load_problems(data).problems
    assert [problem.columns for problem in problems] == [{"unit": "kg", "rubric": {"n": n}} for n in (1, 2)]
    tokenizer = Tokenizer.load(model_path("tiny-base"))
    text = render_problem("{question} in {unit}, {rubric}, {other}", problems[0], tokenizer)
    assert text == '1+1 {unit}? in kg, {"n": 1}, {other}', "names in the question are not replaced"
    with pytest.raises(UserError, match="no column 'units'"):
        load_problems(data.but(columns=("units",)))
    with pytest.raises(UserError, match=r"data\.columns: this key is for files"):
        load_problems(DataSection(columns=("unit",)))


def test_a_chat_keeps_its_earlier_turns(tmp_path: Path) -> None:
    """The same last turn after other ones is another problem."""
    user, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    rows = [[user, answer, {"role": "user", "content": "And 2+2?"}], [{"role": "user", "content": "And 2+2?"}]]
    lines = [json.dumps({"messages": messages, "answer": "4"}) for messages in (*rows, rows[0])]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    loaded = load_problems(DataSection(source=str(tmp_path / "chats.jsonl"), question="messages", held_out=0.0))
    assert loaded.report.duplicated == 1
    assert [problem.turns for problem in loaded.problems] == [(user, answer), ()]
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    core = tokenizers.Tokenizer.from_file(f"{model_path('tiny-base')}/tokenizer.json")
    configs = {name: {} for name in ("tokenizer_config.json", "config.json", "generation_config.json")}
    tokenizer = Tokenizer(core, configs, template)
    prompts = [render_problem("chat", problem, tokenizer) for problem in loaded.problems]
    assert prompts == ["user:1+1?;assistant:2;user:And 2+2?;", "user:And 2+2?;"]
    assert dropped_turns("chat", loaded.problems) == ""
    assert dropped_turns("paper", loaded.problems[1:]) == ""
    assert dropped_turns("paper", loaded.problems) == (
        "1 of 2 problems are chats with earlier turns (problem 1 first), which the prompt template 'paper' leaves out; "
        "set data.template to chat or chat_boxed to keep them"
    )
    tokenizer.chatting("be brief", None)
    assert render_problem("chat", loaded.problems[0], tokenizer).startswith("system:be brief;user:1+1?;")
