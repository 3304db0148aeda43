"""``delta inspect``: choosing, torn files, and its three forms."""

from __future__ import annotations

import gzip
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from delta_cli.errors import UserError
from delta_cli.reporting.html_pages import inspection_page
from delta_cli.reporting.inspection import inspect_run, to_json
from delta_cli.reporting.inspection_text import render
from tests.reporting import synthetic
from tests.reporting.synthetic import HOSTILE


class Seen(HTMLParser):
    """Tags and text of a page, and the addresses it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count a tag."""
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        """Collect text."""
        self.text += data


def printed(path: Path, width: int = 120, **options: object) -> str:
    """The terminal's form, without styles."""
    console = Console(file=io.StringIO(), width=width)
    console.print(render(inspect_run(path, **options)))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def hostile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose prompt, problem and responses try to be markup and terminal codes."""
    folder, tokenizer = synthetic.start(tmp_path_factory.mktemp("runs") / "hostile $x^2$ <b>")
    texts = [f"{HOSTILE}7+8=15", f"{HOSTILE}7+8=14"]
    records = [
        synthetic.record(tokenizer, text, correct=text.endswith("15"), prompt=f"7+8=?{HOSTILE}", problem=HOSTILE)
        for text in texts
    ]
    folder.write_rollouts(1, records)
    folder.append(folder.metrics, synthetic.metrics(1))
    folder.append(folder.notices, {"step": 1, "name": "x", "text": HOSTILE})
    return folder.path


@pytest.mark.parametrize("width", [50, 60, 100, 200])
def test_text_fits(run_path: Path, width: int) -> None:
    """Every line within the terminal, with outcome, advantage, marks, tree and table."""
    output = printed(run_path, width)
    assert max(map(cell_len, output.splitlines())) <= width
    flat = " ".join(output.split())
    for part in ("✓ right ×2", "✗ wrong", "advantage +1.00", "▲", "▼", "◆ right and wrong responses first branch here"):
        assert part in flat
    assert "does not hold: 7+8=16" in output
    assert "“8” −" in output


def test_right_and_wrong_stand_side_by_side(run_path: Path) -> None:
    """In a wide terminal one line holds a right and a wrong response; in a narrow one none does."""

    def beside(width: int) -> bool:
        return any("✓ right" in line and "✗ wrong" in line for line in printed(run_path, width).splitlines())

    assert beside(120)
    assert not beside(60)


def test_choosing(run_path: Path) -> None:
    """By id, by number, by words of the prompt; the last step unless another is asked for."""
    assert inspect_run(run_path).step == 3
    assert inspect_run(run_path, step=1).step == 1
    assert inspect_run(run_path, problem="8+8").problem == "8+8"
    assert inspect_run(run_path, problem="2").problem == "8+8"
    assert inspect_run(run_path, problem="7+8=").problem == "7+8"
    assert inspect_run(run_path, whole_run=True).table.responses == 3 * inspect_run(run_path).table.responses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 9}, "step 9 is not recorded; the nearest recorded step is 3"),
        ({"problem": "99+1"}, "no problem is or contains '99+1'; choose an id (7+8, 8+8"),
        ({"problem": "+8=?"}, "2 problems contain '+8=?'"),
    ],
)
def test_mistakes_are_explained(run_path: Path, options: dict[str, object], message: str) -> None:
    """One line that says what there is to choose from."""
    with pytest.raises(UserError) as caught:
        inspect_run(run_path, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_run(tmp_path: Path) -> None:
    """A folder without a run, and a run without responses."""
    with pytest.raises(UserError, match="holds no run"):
        inspect_run(tmp_path)
    synthetic.start(tmp_path / "run")
    with pytest.raises(UserError, match="no responses are recorded"):
        inspect_run(tmp_path / "run")


def test_a_run_that_was_killed_or_goes_on(tmp_path: Path) -> None:
    """Torn lines of metrics, a torn recording and one half written: what is whole is shown."""
    folder = synthetic.run(tmp_path / "run", steps=2)
    for file in (folder.metrics, folder.evaluations):
        with file.open("ab") as stream:
            stream.write('{"step": 3, "text": "½'.encode()[:-1])
    whole = folder.rollout_file(2).read_bytes()
    folder.rollout_file(2).write_bytes(whole[: len(whole) - 30])
    folder.rollout_file(3).with_suffix(".partial").write_bytes(gzip.compress(b"{")[:10])
    inspection = inspect_run(folder.path)
    assert inspection.step == 2
    assert 0 < len(inspection.responses) <= 4
    assert printed(folder.path, step=1)

    folder.rollout_file(2).write_bytes(b"")
    with pytest.raises(UserError, match="step 2 holds no whole response"):
        inspect_run(folder.path)


def test_a_run_without_an_exported_model_uses_the_tokenizer_it_began_with(tmp_path: Path) -> None:
    """As long as a run goes on there is no model folder; the recipe says which model it is."""
    folder = synthetic.run(tmp_path / "run", steps=1)
    model = folder.model.rename(tmp_path / "base")
    text = folder.recipe.read_text(encoding="utf-8").replace('path = "tiny-base"', f'path = "{model}"')
    folder.recipe.write_text(text, encoding="utf-8")
    assert "✓ right" in printed(folder.path)


def test_json(run_path: Path) -> None:
    """The same facts for programs: pieces join to the text, the parting is where the digits differ."""
    data = json.loads(to_json(inspect_run(run_path)))
    assert [response["correct"] for response in data["responses"]] == [True, True, False, False]
    for response in data["responses"]:
        assert "".join(response["pieces"]) == response["text"] + "<|endoftext|>"
        assert len(response["coefficients"]) == len(response["tokens"]) == len(response["pieces"])
    assert [each["holds"] for each in data["responses"][3]["equations"]] == [False]
    assert data["first_parting"] == {"tokens_before": 5, "after": "7+8=1"}
    assert data["tree"]["text"] == "7+8=1"
    assert {child["text"][0]: (child["right"], child["wrong"]) for child in data["tree"]["children"]} == {
        "5": (2, 0), "6": (0, 1), "8": (0, 1),
    }  # fmt: skip


def test_several_rewards_are_told_apart(tmp_path: Path) -> None:
    """In all three forms, each before its weight; a name is no markup either."""
    folder, tokenizer = synthetic.start(tmp_path / "run")
    own = {"rewards": {"math": 1.0, HOSTILE: -0.25}, "reward": 0.875}
    lines = [synthetic.record(tokenizer, "7+8=15", correct=True) | own, synthetic.record(tokenizer, "8", correct=False)]
    folder.write_rollouts(1, lines)
    assert "reward 0.875 (math 1, <script>alert(1)</script>" in " ".join(printed(folder.path, 300).split())
    assert "\x1b[31m" not in printed(folder.path, 300)
    page = Seen(inspection_page(inspect_run(folder.path)))
    assert "script" not in page.tags
    assert "reward 0.875 (math 1, <script>" in page.text
    told = json.loads(to_json(inspect_run(folder.path)))["responses"]
    assert [response["rewards"] for response in told] == [own["rewards"], {}]


def test_page_shows_hostile_text_as_text(hostile_path: Path) -> None:
    """Markup in prompt, problem and response is text; nothing is fetched and no script is there."""
    seen = Seen(inspection_page(inspect_run(hostile_path)))
    assert "script" not in seen.tags
    assert seen.fetched == []
    assert "<script>alert(1)</script>" in seen.text
    assert r"\x1b[31m" in seen.text
    assert not {char for char in seen.text if not char.isprintable() and char not in "\n"}


def test_terminal_shows_hostile_text_as_text(hostile_path: Path) -> None:
    """No escape code and no direction mark of the text reaches the terminal."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    console.print(render(inspect_run(hostile_path)))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]0;" not in output
    assert "\x07" not in output
    assert "\u202e" not in output


def test_page_has_values_to_hover_and_a_legend(run_path: Path) -> None:
    """Every token carries its coefficient; the scale's ends are written out."""
    page = inspection_page(inspect_run(run_path))
    assert 'title="coefficient 1.200   p 0.607   entropy 0.25"' in page
    assert "0.80 damped (dotted)" in page
    assert "(solid) amplified 1.20" in page


def test_a_step_that_taught_nothing_says_why(tmp_path: Path) -> None:
    """All advantages 0: no table without rows."""
    folder, tokenizer = synthetic.start(tmp_path / "run")
    wrong = [synthetic.record(tokenizer, text, correct=False, advantage=0.0) for text in ("7+8=14", "7+8=13")]
    folder.write_rollouts(1, wrong)
    folder.append(folder.metrics, synthetic.metrics(1))
    text = printed(tmp_path / "run")
    assert "No token of step 1 has an advantage: the responses to each prompt all got the same reward" in text
    assert "amplified\n" not in text.partition("Where the responses branch")[2]
