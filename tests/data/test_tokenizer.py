"""The tokenizer against transformers', and its manners on broken folders."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tiny_base import EOS, write_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from delta_cli.data import chat_template
from delta_cli.data.tokenizer import REPLACEMENT, Tokenizer
from delta_cli.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(str(folder))


@pytest.fixture(scope="module")
def theirs(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_agrees_with_transformers_and_round_trips(tokenizer: Tokenizer, theirs, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == theirs(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special=False) == theirs.decode(ids.tolist()) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=30))
def test_pieces_join_to_the_text_whatever_the_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Also of ids beyond the vocabulary; bytes that form no character may be counted differently."""
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids)
    whole = tokenizer.decode(ids, skip_special=False)
    if REPLACEMENT not in whole:
        assert "".join(pieces) == whole
    assert "".join(pieces).replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")


def test_a_character_split_over_tokens_belongs_to_the_last(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces(tokenizer.encode("a€b")) == ["a", "", "", "€", "b"]


def test_a_character_cut_off_at_the_end_still_shows(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces(tokenizer.encode("a€")[:-1]) == ["a", "", REPLACEMENT]


def test_special_tokens_are_skipped_in_text_and_named_in_pieces(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("\\boxed{7}"), *tokenizer.eos_ids]
    assert tokenizer.decode(ids) == "\\boxed{7}"
    assert tokenizer.pieces(ids) == ["\\boxed{", "7", "}", EOS]


def test_ids_beyond_the_tokenizer_are_replaced(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size
    ids = [*tokenizer.encode("ab"), beyond, beyond + 99, -1]
    assert tokenizer.decode(ids) == "ab" + 3 * REPLACEMENT
    assert tokenizer.pieces(ids) == ["a", "b", *3 * [REPLACEMENT]]


def test_a_tokenizer_that_writes_spaces_its_own_way(tmp_path: Path) -> None:
    """Metaspace decoders, as in Llama 2, drop the space at the beginning of a text only."""
    vocabulary = {"<s>": 0, "▁a": 1, "▁b": 2, "<unk>": 3}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(str(tmp_path)).pieces([1, 2, 1]) == ["a", " b", " a"]


def test_eos_is_the_union_of_what_the_files_say(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "pad_token_id": 9}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.eos_ids == (0, 5, 7)
    assert tokenizer.pad_id == 9


TEMPLATES = {
    "plain": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
    "whitespace": "{%- for m in messages %}\n    {% if m.role %}\n{{ m.content }}{% endif %}\n{% endfor %}\nA:",
    "prompted": "{{ messages[-1].content }}{% if add_generation_prompt %}<think>\n{% endif %}",
    "controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ {'é': '<'} | tojson(indent=2) }}",
    "tokens": "{{ bos_token or 'none' }}{{ messages[-1].content }}{{ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "options": "{{ messages[-1].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_render_as_transformers_does(folder: Path, tmp_path: Path, theirs, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'What is "1 + 1"?\n'}]
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    chat = Tokenizer.load(str(tmp_path)).chat(messages[1]["content"], messages[0]["content"], enable_thinking=False)
    assert chat == expected


def test_a_chat_template_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than rendering, and there is a prompt for every problem."""
    made, make = [], chat_template._environment
    monkeypatch.setattr(chat_template, "_environment", lambda: (made.append(1), make())[1])
    chat_template._compiled.cache_clear()
    tokenizer = Tokenizer.load(str(folder))
    assert len({tokenizer.chat(f"What is {n}?") for n in range(5)}) == 5
    assert len(made) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% if %}", "chat template fails"),
        ("{{ 1 + 'a' }}", "chat template fails"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),  # a template comes from anyone
        (None, "no chat template"),
    ],
)
def test_a_chat_template_that_fails_says_so(folder: Path, tmp_path: Path, template: str | None, reason: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=reason):
        Tokenizer.load(str(tmp_path)).chat("hello")


CHARACTERS = "{% for a in messages[0].content %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3, r"more than 2 s"),
        pytest.param(CHARACTERS * 3 + "{% endfor %}" * 3, r"more than 2 s", marks=pytest.mark.long),
        ("{{ 'a' * 20000000000 }}", r"more than 1 GiB"),  # while it is compiled
        ("{% set n = 20000000000 %}{{ 'a' * n }}", r"more than 1 GiB"),
        ("{{ 'a' | center(20000000000) }}", r"more than 1 GiB"),
        ("{{ 'ab' * 3000000 }}", r"writes 6,000,000 characters for a conversation of 5"),
    ],
)
def test_a_chat_template_is_tried_with_limits(folder: Path, tmp_path: Path, template: str, reason: str) -> None:
    """In a process of its own, so that a template from anyone cannot take the machine's memory or a run's time."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=f"chat template fails: it .*{reason}") as error:
        Tokenizer.load(str(tmp_path)).chat("hello")
    assert "\n" not in str(error.value)


def test_a_chat_template_is_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, run = [], chat_template.subprocess.run
    monkeypatch.setattr(chat_template.subprocess, "run", lambda *a, **k: (tried.append(1), run(*a, **k))[1])
    chat_template.try_out.cache_clear()
    for _ in range(2):
        tokenizer = Tokenizer.load(str(folder))
        assert tokenizer.chat("1?") != tokenizer.chat("2?")
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "not a tokenizer"),
        ({"tokenizer.json": None, "config.json": "[1"}, "not valid JSON"),
        ({"tokenizer.json": None, "config.json": "[1]"}, "holds a list"),
    ],
)
def test_broken_folders_are_one_line(folder: Path, tmp_path: Path, files: dict[str, str | None], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text((folder / name).read_text() if text is None else text)
    with pytest.raises(UserError, match=reason) as caught:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "nowhere", "a/b/c"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        Tokenizer.load(model)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(name: str, allow_patterns: list[str]) -> str:
        assert name == "some/model"
        assert "tokenizer.json" in allow_patterns
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match="no network") as caught:
        Tokenizer.load("some/model")
    assert "\n" not in str(caught.value)
