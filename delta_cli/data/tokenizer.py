"""Text to token ids and back, from the files of a model folder; no transformers needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.arrays import Ids
from backends.stop_strings import StopText
from delta_cli.errors import NotFetchedError, UserError

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja")
REPLACEMENT = "\ufffd"  # stands for an id the tokenizer does not have, and for bytes that are no character
LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, so at most that many tokens share one


class Tokenizer:
    """The tokenizer of a model, with its end-of-sequence ids and its chat template."""

    def __init__(self, core: tokenizers.Tokenizer, configs: dict[str, dict[str, Any]], template: str | None) -> None:
        """``configs`` maps the names of FILES to their contents; ``template`` is Jinja, None without one."""
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._template = template
        self._system: str | None = None
        self._chat_options: dict[str, object] = {}
        self._special = _special_tokens(configs["tokenizer_config.json"])
        vocabulary = core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._known = np.zeros(self.vocab_size, dtype=bool)
        self._known[list(vocabulary.values())] = True
        self.longest_token: int = max(map(len, vocabulary), default=1)  # characters that one token can stand for
        self.eos_ids: tuple[int, ...] = tuple(sorted(self._declared_ids(configs, "eos")))
        self._stops: dict[tuple[str, ...], StopText] = {}
        self.pad_id: int = next(iter([*self._declared_ids(configs, "pad"), *self.eos_ids]), 0)

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Read a model folder, or fetch the tokenizer of a Hugging Face hub name.

        Raises UserError where a file is missing or broken or the hub cannot be reached.
        """
        folder = _folder(model)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder}: no tokenizer.json; give a model folder or hub name that has one")
        try:
            core = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{file}: not a tokenizer ({error}); download the model again") from error
        configs = {name: _read_json(folder / name) for name in FILES if name.endswith("config.json")}
        tokenizer = cls(core, configs, _read_template(folder, configs["tokenizer_config.json"]))
        _check_ends(tokenizer.eos_ids, configs["config.json"], folder)
        return tokenizer

    def chatting(self, system: str | None, thinking: bool | None) -> Tokenizer:
        """This tokenizer, whose chats begin with a system message and set the template's enable_thinking.

        None leaves the template's default. Raises UserError where the template has no such switch.
        """
        if thinking is not None and self.chat("?", enable_thinking=True) == self.chat("?", enable_thinking=False):
            raise UserError("data.thinking: the model's chat template has no switch enable_thinking; remove the key")
        self._system = system
        self._chat_options = {} if thinking is None else {"enable_thinking": thinking}
        return self

    def encode(self, text: str, special: bool = True) -> Ids:
        """Token ids, int64. ``special`` adds what the tokenizer puts around a text, e.g. a begin-of-sequence."""
        return np.array(self._core.encode(text, add_special_tokens=special).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | Ids, skip_special: bool = True) -> str:
        """The text of token ids; an id beyond the tokenizer (a padded vocabulary) becomes U+FFFD."""
        runs = groupby((int(token) for token in ids), key=self._knows)
        return "".join(
            self._core.decode(list(run), skip_special_tokens=skip_special) if known else REPLACEMENT * len(list(run))
            for known, run in runs
        )

    def stop_text(self, strings: Sequence[str]) -> StopText | None:
        """What ends a response at the first of these strings; None where there are none."""
        if not strings:
            return None
        key = tuple(strings)
        if key not in self._stops:
            self._stops[key] = StopText.of(key, self._decode_all, self.vocab_size)
        return self._stops[key]

    def _decode_all(self, ids: Ids) -> str:
        return self.decode(ids, skip_special=False)

    def pieces(self, ids: Sequence[int] | Ids) -> list[str]:
        """The text each token adds; joined, they are ``decode(ids, skip_special=False)``.

        Of tokens that share one character, the last carries it and the others are empty.
        """
        tokens = [int(token) for token in ids]
        texts = [""] * len(tokens)
        context: list[int] = []  # the tokens that were settled last
        first = 0  # of those not settled yet
        for last, token in enumerate(tokens):
            text = self._settle(context, tokens[first : last + 1])
            settled = last
            if last + 1 < len(tokens) and self._knows(token) and text.endswith(REPLACEMENT):
                if last + 1 - first < LONGEST_CHARACTER:
                    continue  # the next token may complete the character
                settled = first  # no character begins at the first, then; one may at the others
                text = self._settle(context, [tokens[first]])
            texts[settled] = text
            context, first = tokens[first : settled + 1], settled + 1
        return texts

    def chat(self, question: str, system: str | None = None, **template_kwargs: object) -> str:
        """The question in the model's chat template, up to where the assistant's answer begins.

        Raises UserError where the model has no template or the template refuses.
        """
        system = self._system if system is None else system
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": question})
        return self.converse(messages, **template_kwargs)

    @property
    def converses(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def converse(self, messages: Sequence[Mapping[str, str]], **template_kwargs: object) -> str:
        """Messages of role and content in the model's chat template, up to where the next answer begins.

        Raises UserError where the model has no template or the template refuses.
        """
        if self._template is None:
            raise UserError("the model has no chat template; set the prompt template to 'plain' or 'paper'")
        names = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return _compiled(self._template).render({**self._special, **names, **self._chat_options, **template_kwargs})
        except Exception as error:  # a template is code, and raises whatever it likes
            raise UserError(f"the model's chat template failed: {error}; set another prompt template") from error

    def _knows(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and bool(self._known[token])

    def _settle(self, context: list[int], tokens: list[int]) -> str:
        """What ``tokens`` add after ``context``: some decoders treat the beginning of a text differently."""
        before = len(self.decode(context, skip_special=False))
        return self.decode(context + tokens, skip_special=False)[before:]

    def _declared_ids(self, configs: dict[str, dict[str, Any]], kind: str) -> list[int]:
        """Ids that any of the model's files names as its eos or pad token, each once."""
        found: list[Any] = []
        for name in ("generation_config.json", "config.json"):
            config = configs[name]
            inner = config.get("text_config")  # of a model that also sees or hears
            outer_value = config.get(f"{kind}_token_id")
            value = inner.get(f"{kind}_token_id") if outer_value is None and isinstance(inner, dict) else outer_value
            found += value if isinstance(value, list) else [value]
        found.append(self._core.token_to_id(self._special.get(f"{kind}_token", "")))
        return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _folder(model: str) -> Path:
    """Where the files of a model are: its folder, or the hub's cache after fetching them."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{model}: no such model folder; give a folder or a hub name like 'Qwen/Qwen3-8B-Base'")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{model}: not a folder, and fetching it from the hub needs huggingface_hub; "
            "run: pip install 'delta-rlvr[hub]'"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:  # what the hub's own errors derive from
        reason = str(error).strip().partition("\n")[0]
        raise NotFetchedError(f"{model}: not a folder, and the hub does not give it ({reason})") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds a {type(value).__name__}, not an object; download the model again")
    return value


def _check_ends(ends: Sequence[int], config: dict[str, Any], folder: Path) -> None:
    """Raise UserError where the model has no row for an end-of-sequence id: no response could end with it."""
    inner = config.get("text_config")
    rows = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    outside = [end for end in ends if isinstance(rows, int) and not 0 <= end < rows]
    if outside:
        raise UserError(
            f"{folder}: end-of-sequence id {outside[0]} is outside the model's vocabulary of {rows}; put eos_token_id "
            "right in generation_config.json or config.json"
        )


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or an entry of the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … by name; written as text or as an object with its content."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


class _Generation(Extension):
    """Templates may mark the assistant's part with a ``generation`` block; for a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012 the base class's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """A chat template, made ready once: that takes longer than rendering it, and there is one for every prompt."""
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    """What chat templates on the hub are written for, in a sandbox: they come with the model, from anyone."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
