"""Chats with tools over token ids: what the model sampled is read and extended, never rendered or tokenised again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.arrays import Ids
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.schema import ToolSchema
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from renderers import Renderer

SENTINEL = "delta sentinel text"  # stands where the model's own tokens are
PROBE = "delta probe text"
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote. ``problem`` says why it could not be read, if so."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None
    id: str | None = None


ToolResult = tuple[ToolCall, str]


class Dialogue(Protocol):
    """The form that a family of models gives to chats with tools."""

    stop_ids: tuple[int, ...]  # each ends a turn

    def prompt(self, question: str) -> Ids:
        """The ids up to the model's first turn."""

    def calls(self, before: Ids, turn: Ids) -> list[ToolCall]:
        """The calls in a turn, after the ids ``before`` it."""

    def extend(self, prompt: Ids, region: Ids, results: Sequence[ToolResult]) -> Ids | None:
        """The ids between ``region``, which ends with a turn of the model, and its next turn; None if it is unsafe."""


def open_dialogue(
    tokenizer: Tokenizer, model: str, renderer: str, tools: Sequence[ToolSchema], thinking: bool | None
) -> Dialogue:
    """The dialogue of a model: by the package renderers if it knows the family, else by the model's own template.

    ``renderer`` is a name of that package, "template" or "auto". Raises UserError if neither can extend a chat.
    """
    if renderer == "template":
        return TemplateDialogue(tokenizer, tools)
    known = find_family(model, renderer)
    return (
        TemplateDialogue(tokenizer, tools)
        if known is None
        else RendererDialogue(tokenizer, model, known, tools, thinking)
    )


def find_family(model: str, renderer: str) -> str | None:
    """The renderer of a model; None if its own template is to be used."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
        from renderers.configs import config_from_name
    except ImportError as error:
        if renderer == "auto":
            return None
        raise UserError(
            f'environment.renderer = "{renderer}" needs the package renderers; run: '
            "pip install 'delta-rlvr[renderers]'"
        ) from error
    if renderer != "auto":
        try:
            config_from_name(renderer)
        except ValueError as error:
            raise UserError(f'environment.renderer = "{renderer}": {error}') from error
        return renderer
    by_folder = {name.partition("/")[2]: found for name, found in MODEL_RENDERER_MAP.items()}
    return MODEL_RENDERER_MAP.get(model) or by_folder.get(Path(model).name)


class RendererDialogue:
    """The package renderers; see :class:`Dialogue`."""

    def __init__(
        self, tokenizer: Tokenizer, model: str, name: str, tools: Sequence[ToolSchema], thinking: bool | None
    ) -> None:
        from renderers import create_renderer
        from renderers.configs import config_from_name

        self._tokenizer = tokenizer
        self._tools: Any = [tool["function"] for tool in tools]
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            self._renderer: Renderer = create_renderer(
                RendererTokenizer(tokenizer, model), config_from_name(name), chat_template_kwargs=options
            )
        except Exception as error:  # it asserts, and raises what its configurations do
            raise UserError(
                f'environment.renderer = "{name}" does not fit the tokenizer of {model} ({error}); choose another, or '
                '"template"'
            ) from error
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def prompt(self, question: str) -> Ids:
        messages: Any = self._tokenizer.messages(question)
        ids = self._renderer.render_ids(messages, tools=self._tools, add_generation_prompt=True)
        return np.array(ids, dtype=np.int64)

    def calls(self, before: Ids, turn: Ids) -> list[ToolCall]:
        found = self._renderer.parse_response(turn.tolist(), tools=self._tools, prompt_ids=before.tolist())
        return [_parsed(call) for call in found.tool_calls]

    def extend(self, prompt: Ids, region: Ids, results: Sequence[ToolResult]) -> Ids | None:
        messages: Any = [
            {"role": "tool", "content": text, "name": call.name, "tool_call_id": call.id or f"call_{place}"}
            for place, (call, text) in enumerate(results)
        ]
        bridge, tools = self._renderer.bridge_to_next_turn, self._tools
        extended = bridge(prompt.tolist(), region.tolist(), messages, tools=tools)
        ids = None if extended is None else np.array(extended.token_ids, dtype=np.int64)
        before = np.concatenate([prompt, region])
        if ids is None or not np.array_equal(ids[: len(before)], before):
            return None
        return ids[len(before) :]


def _parsed(call: Any) -> ToolCall:
    arguments = call.arguments
    if call.status == "ok" and call.name and isinstance(arguments, dict):
        return ToolCall(call.name, arguments, None, call.id)
    return ToolCall(call.name or "?", {}, f"the call could not be read ({call.status})", call.id)


class RendererTokenizer:
    """A tokenizer as the package renderers wants it."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer, self.name_or_path = tokenizer, name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = next(iter(tokenizer.eos_ids), None)

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Token ids."""
        found: list[int] = self._tokenizer.encode(text, special=add_special_tokens).tolist()
        return found

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The ids of tokens by their text; None for one that does not exist."""
        if isinstance(tokens, str):
            return self._tokenizer.id_of(tokens)
        return [self._tokenizer.id_of(token) for token in tokens]


class TemplateDialogue:
    """The model's chat template, where a longer chat begins with the shorter one; see :class:`Dialogue`.

    Calls are JSON between <tool_call> and </tool_call>. What the template writes after the model's turn is found by
    rendering a chat with other text in its place. Raises UserError if the template does not show tools, or changes
    what came before when the chat goes on.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[ToolSchema]) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self.stop_ids = tokenizer.eos_ids
        user = tokenizer.messages("?")
        first = self._render(user)
        one = [*user, {"role": "assistant", "content": SENTINEL}, {"role": "tool", "content": PROBE}]
        two = [*one, {"role": "assistant", "content": SENTINEL}, {"role": "tool", "content": PROBE}]
        second = self._render(one)
        problem = ""
        if any(tool["function"]["name"] not in first for tool in tools):
            problem = "does not show tools to the model"
        elif not second.startswith(first + SENTINEL) or PROBE not in second:
            problem = "changes what came before when a tool answers"
        elif not self._render(two).startswith(second + SENTINEL):
            problem = "changes what came before in a later turn"
        if problem:
            raise UserError(
                f"[environment]: the model's chat template {problem}, so episodes cannot be extended token by token; "
                "set environment.renderer to the model's family (pip install 'delta-rlvr[renderers]'), or use "
                'environment.kind = "text"'
            )

    def prompt(self, question: str) -> Ids:
        return self._tokenizer.encode(self._render(self._tokenizer.messages(question)), special=False)

    def calls(self, before: Ids, turn: Ids) -> list[ToolCall]:
        found = []
        for body in CALL.findall(self._tokenizer.decode(turn, skip_special=False)):
            try:
                call = json.loads(body)
                name, arguments = call["name"], call.get("arguments", {})
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                if not isinstance(name, str) or not isinstance(arguments, dict):
                    raise TypeError
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                found.append(ToolCall("?", {}, "the call is not JSON with a name and arguments"))
            else:
                found.append(ToolCall(name, arguments))
        return found

    def extend(self, prompt: Ids, region: Ids, results: Sequence[ToolResult]) -> Ids | None:
        answers = [{"role": "tool", "content": text, "name": call.name} for call, text in results]
        user = self._tokenizer.messages("?")
        whole = self._render([*user, {"role": "assistant", "content": SENTINEL}, *answers])
        first = self._render(user) + SENTINEL
        end = self._tokenizer.decode(region[-1:], skip_special=False)
        if not whole.startswith(first + end):
            return None
        return self._tokenizer.encode(whole[len(first) + len(end) :], special=False)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._tokenizer.converse(messages, tools=self._tools)
