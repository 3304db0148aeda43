"""Text to token ids and back, read from the files of a model folder without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from backends.arrays import Ids
from backends.stop_strings import StopText
from delta_cli.data.chat_template import TemplateError, render
from delta_cli.errors import NotFetchedError, UserError, first_line

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja")
REPLACEMENT = "\ufffd"  # the text of an id outside the tokenizer, and of bytes that are not a character
LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, and so the most tokens that share one


class Tokenizer:
    """The tokenizer of a model, with its end-of-sequence ids and its chat template."""

    def __init__(self, core: tokenizers.Tokenizer, configs: dict[str, dict[str, Any]], template: str | None) -> None:
        """``configs`` maps the names in FILES to their contents. ``template`` is Jinja; None if the model has none."""
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
        self.longest_token: int = max(map(len, vocabulary), default=1)  # in characters
        self.eos_ids: tuple[int, ...] = tuple(sorted(self._declared_ids(configs, "eos")))
        added = (token.content for token in core.get_added_tokens_decoder().values())
        self._added = sorted((token for token in added if len(token) > 1), key=len, reverse=True)
        self._stops: dict[tuple[str, ...], StopText] = {}
        self.pad_id: int = next(iter([*self._declared_ids(configs, "pad"), *self.eos_ids]), 0)

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Read the tokenizer of a model folder, or fetch it from the Hugging Face hub.

        Raises UserError if a file is missing or broken, or the hub cannot be reached.
        """
        folder = small_files(model)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder}: no tokenizer.json; give a model folder or hub name that has one")
        try:
            core = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{file}: not a tokenizer ({error}); download the model again") from error
        configs = {name: read_json(folder / name) for name in FILES if name.endswith("config.json")}
        tokenizer = cls(core, configs, _read_template(folder, configs["tokenizer_config.json"]))
        _check_ends(tokenizer.eos_ids, configs["config.json"], folder)
        return tokenizer

    def chatting(self, system: str | None, thinking: bool | None) -> Tokenizer:
        """Begin chats with a system message, and set the template's switch enable_thinking; returns this tokenizer.

        None leaves the template's default. Raises UserError if the template has no such switch.
        """
        if thinking is not None and self.chat("?", enable_thinking=True) == self.chat("?", enable_thinking=False):
            raise UserError("data.thinking: the model's chat template has no switch enable_thinking; remove the key")
        self._system = system
        self._chat_options = {} if thinking is None else {"enable_thinking": thinking}
        return self

    def encode(self, text: str, special: bool = True) -> Ids:
        """Token ids, int64. ``special`` adds the tokens around a text, such as begin-of-sequence."""
        return np.array(self._core.encode(text, add_special_tokens=special).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | Ids, skip_special: bool = True) -> str:
        """The text of token ids. An id outside the tokenizer (from a padded vocabulary) becomes U+FFFD."""
        runs = groupby((int(token) for token in ids), key=self._knows)
        return "".join(
            self._core.decode(list(run), skip_special_tokens=skip_special) if known else REPLACEMENT * len(list(run))
            for known, run in runs
        )

    def without_special(self, text: str) -> str:
        """The text with a space inside each special token, so that none is read as one."""
        for token in self._added:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def stop_text(self, strings: Sequence[str]) -> StopText | None:
        """The check that ends a response at the first of these strings; None without strings."""
        if not strings:
            return None
        key = tuple(strings)
        if key not in self._stops:
            self._stops[key] = StopText.of(key, self._decode_all, self.vocab_size)
        return self._stops[key]

    def _decode_all(self, ids: Ids) -> str:
        return self.decode(ids, skip_special=False)

    def pieces(self, ids: Sequence[int] | Ids) -> list[str]:
        """The text that each token adds. Joined, the pieces are ``decode(ids, skip_special=False)``.

        If several tokens share one character, the last of them carries it and the others are empty.
        """
        tokens = [int(token) for token in ids]
        texts = [""] * len(tokens)
        context: list[int] = []  # tokens of the piece before
        first = 0  # first token without a piece
        for last, token in enumerate(tokens):
            text = self._settle(context, tokens[first : last + 1])
            settled = last
            if last + 1 < len(tokens) and self._knows(token) and text.endswith(REPLACEMENT):
                if last + 1 - first < LONGEST_CHARACTER:
                    continue  # the next token may complete the character
                settled = first  # the first token begins no character; a later one may
                text = self._settle(context, [tokens[first]])
            texts[settled] = text
            context, first = tokens[first : settled + 1], settled + 1
        return texts

    def chat(self, question: str, system: str | None = None, **template_kwargs: object) -> str:
        """The question in the model's chat template, up to the beginning of the assistant's answer.

        Raises UserError if the model has no template or the template refuses.
        """
        return self.converse(self.messages(question, system), **template_kwargs)

    def messages(self, question: str, system: str | None = None) -> list[dict[str, str]]:
        """The beginning of a chat: the system message, if there is one, and the question."""
        system = self._system if system is None else system
        messages = [{"role": "system", "content": system}] if system is not None else []
        return [*messages, {"role": "user", "content": question}]

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if there is none."""
        found: int | None = self._core.token_to_id(token)
        return found

    def continue_chat(self, turns: Sequence[Mapping[str, str]], question: str) -> str:
        """A chat with earlier ``turns`` and the question, up to the beginning of the assistant's answer.

        The system message of :meth:`chatting`, if there is one, takes the place of the chat's own.
        """
        if self._system is not None:
            turns = [{"role": "system", "content": self._system}, *(t for t in turns if t["role"] != "system")]
        return self.converse([*turns, {"role": "user", "content": question}])

    @property
    def converses(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def converse(self, messages: Sequence[Mapping[str, str]], **template_kwargs: object) -> str:
        """Messages (role, content) in the model's chat template, up to the beginning of the next answer.

        Raises UserError if the model has no template or the template refuses.
        """
        if self._template is None:
            raise UserError("the model has no chat template; set the prompt template to 'plain' or 'paper'")
        names = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return render(self._template, {**self._special, **names, **self._chat_options, **template_kwargs})
        except TemplateError as error:
            raise UserError(f"the model's chat template fails: {error}; set another prompt template") from error

    def _knows(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and bool(self._known[token])

    def _settle(self, context: list[int], tokens: list[int]) -> str:
        """The text that ``tokens`` add after ``context``; some decoders treat the beginning of a text differently."""
        before = len(self.decode(context, skip_special=False))
        return self.decode(context + tokens, skip_special=False)[before:]

    def _declared_ids(self, configs: dict[str, dict[str, Any]], kind: str) -> list[int]:
        """The ids that the model's files declare as its eos or pad token, each once."""
        found: list[Any] = []
        for name in ("generation_config.json", "config.json"):
            config = configs[name]
            inner = config.get("text_config")  # of a multimodal model
            outer_value = config.get(f"{kind}_token_id")
            value = inner.get(f"{kind}_token_id") if outer_value is None and isinstance(inner, dict) else outer_value
            found += value if isinstance(value, list) else [value]
        found.append(self._core.token_to_id(self._special.get(f"{kind}_token", "")))
        return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def model_folder(model: str) -> Path | None:
    """The folder that ``model`` names, or None if it is a name on the hub. Raises UserError if it can be neither."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{model}: is a file; give the model folder that it is in, or a hub name")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{model}: no such model folder; give a folder or a hub name like 'Qwen/Qwen3-8B-Base'")
    return None


def small_files(model: str) -> Path:
    """The folder with a model's config and tokenizer: its own, or the hub's cache after fetching FILES.

    Raises UserError if there is no such folder, or NotFetchedError if the hub does not give them now.
    """
    if (folder := model_folder(model)) is not None:
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{model}: is not a folder, and fetching it from the hub needs huggingface_hub; "
            "run: pip install 'delta-rlvr[hub]'"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:  # what the hub's own errors derive from
        raise NotFetchedError(
            f"{model}: is not a folder, and cannot be fetched from the hub ({first_line(error)})"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model; empty if the file does not exist. Raises UserError for another content."""
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
    """Raise UserError if an end-of-sequence id is outside the vocabulary, because no response could end with it."""
    inner = config.get("text_config")
    rows = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    outside = [end for end in ends if isinstance(rows, int) and not 0 <= end < rows]
    if outside:
        raise UserError(
            f"{folder}: end-of-sequence id {outside[0]} is outside the model's vocabulary of {rows}; correct "
            "eos_token_id in generation_config.json or config.json"
        )


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, or an entry of the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … by name. A file writes each as text or as an object with its content."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
