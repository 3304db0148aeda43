"""Chats with tools over token ids, in the forms of several families: extended without touching a sampled id."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from backends.arrays import Ids
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.dialogue import Dialogue, RendererDialogue, TemplateDialogue, open_dialogue
from delta_cli.environments.python_tool import SCHEMA
from delta_cli.errors import UserError

CHATML = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_CALL = '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call><|im_end|>'
XML = (
    '<minimax:tool_call>\n<invoke name="python">\n<parameter name="code">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
# By family: its special tokens, the one that ends a turn first, and how it writes a call.
FAMILIES = {
    "template": ("<|im_end|> <|im_start|>", JSON_CALL),
    "qwen3": (
        "<|im_end|> <|im_start|> <|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> "
        "</think>",
        JSON_CALL,
    ),
    "glm-4.5": (
        "<|observation|> <|endoftext|> <|user|> <|assistant|> <|system|> [gMASK] <sop> <think> </think> <tool_call> "
        "</tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response> /nothink",
        "\n<think></think>\n<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
        "<|observation|>",
    ),
    "minimax-m2": (
        "[e~[ ]~!b[ ]~b] <think> </think> <minimax:tool_call> </minimax:tool_call>",
        "so</think>\n\n" + XML + "[e~[",
    ),
}


def make_tokenizer(tokens: str, template: str | None = CHATML) -> Tokenizer:
    """A tokenizer of bytes with a family's special tokens."""
    special = tokens.split()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    configs: dict[str, Any] = {"tokenizer_config.json": {"eos_token": special[0]}}
    return Tokenizer(core, configs | {"config.json": {}, "generation_config.json": {}}, template)


def make_dialogue(family: str) -> tuple[Tokenizer, Dialogue]:
    tokenizer = make_tokenizer(FAMILIES[family][0])
    if family == "template":
        return tokenizer, TemplateDialogue(tokenizer, [SCHEMA])
    pytest.importorskip("renderers")
    return tokenizer, RendererDialogue(tokenizer, "some/model", family, [SCHEMA], None)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("episodes", [8, pytest.param(340, marks=pytest.mark.long)])
def test_episodes_keep_every_sampled_id(family: str, episodes: int) -> None:
    """Turns hold ids that no tokenizer would write for their text; each call is read and each answer follows."""
    tokenizer, dialogue = make_dialogue(family)
    end = tokenizer.eos_ids[0]
    assert end in dialogue.stop_ids
    rng = random.Random(family)
    prompt = dialogue.prompt("What is 1 + 1?")
    assert "python" in tokenizer.decode(prompt, skip_special=False)
    assert "What is 1 + 1?" in tokenizer.decode(prompt, skip_special=False)
    for _ in range(episodes):
        region: Ids = np.zeros(0, np.int64)
        sampled: list[tuple[int, list[int]]] = []
        for turn in range(rng.randint(1, 4)):
            code = "".join(rng.choice("1+ab é\U0001f600") for _ in range(rng.randint(1, 9)))
            text = FAMILIES[family][1].format(code)
            noise = [] if family == "minimax-m2" or turn else [rng.randrange(33, 126)] * rng.randint(0, 3)
            own = [*noise, *tokenizer.encode(text, special=False).tolist()]
            sampled.append((len(region), own))
            before, region = np.concatenate([prompt, region]), np.concatenate([region, own]).astype(np.int64)
            (call,) = dialogue.calls(before, np.array(own, np.int64))
            assert (call.name, call.problem) == ("python", None)
            assert call.arguments["code"].strip() == code.strip()
            more = dialogue.extend(prompt, region, [(call, f"result {turn}")])
            assert more is not None
            written = tokenizer.decode(more, skip_special=False)
            assert f"result {turn}" in written
            assert "call" not in written.replace("tool_call", ""), "nothing of the turn is written again"
            region = np.concatenate([region, more])
        for place, own in sampled:
            assert region[place : place + len(own)].tolist() == own


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calls_that_cannot_be_read(family: str) -> None:
    tokenizer, dialogue = make_dialogue(family)
    prompt = dialogue.prompt("?")
    answer = tokenizer.encode("The answer is 2." + FAMILIES[family][0].split()[0], special=False)
    assert dialogue.calls(prompt, answer) == []
    if FAMILIES[family][1] is JSON_CALL:
        broken = tokenizer.encode('<tool_call>\n{"name": "python", "arg\n</tool_call><|im_end|>', special=False)
        (call,) = dialogue.calls(prompt, broken)
        assert call.problem is not None
        assert dialogue.extend(prompt, broken, [(call, call.problem)]) is not None


CHANGES = CHATML.replace("{{ message.content }}", "{{ message.content if loop.last else message.content | upper }}")
BLIND = CHATML.replace("Tools: {{ tools | tojson }}", "Tools")


@pytest.mark.parametrize(("template", "said"), [(CHANGES, "changes what came before"), (BLIND, "does not show tools")])
def test_templates_that_cannot_be_extended_are_refused(template: str, said: str) -> None:
    tokenizer = make_tokenizer(FAMILIES["template"][0], template)
    with pytest.raises(UserError, match=said):
        open_dialogue(tokenizer, "unknown/model", "auto", [SCHEMA], None)


def test_a_turn_that_ends_otherwise_is_not_extended() -> None:
    tokenizer, dialogue = make_dialogue("template")
    prompt = dialogue.prompt("?")
    turn = tokenizer.encode(JSON_CALL.format("1").replace("<|im_end|>", "."), special=False)
    assert dialogue.extend(prompt, turn, [(dialogue.calls(prompt, turn)[0], "1")]) is None


def test_the_family_is_found_by_name(tmp_path: Path) -> None:
    pytest.importorskip("renderers")
    tokenizer = make_tokenizer(FAMILIES["qwen3"][0])
    for model in ("Qwen/Qwen3-8B", str(tmp_path / "Qwen3-8B")):
        assert isinstance(open_dialogue(tokenizer, model, "auto", [SCHEMA], None), RendererDialogue)
    assert isinstance(open_dialogue(tokenizer, "own/model", "auto", [SCHEMA], None), TemplateDialogue)
    with pytest.raises(UserError, match="nothing-1"):
        open_dialogue(tokenizer, "own/model", "nothing-1", [SCHEMA], None)
    with pytest.raises(UserError, match="does not fit"):
        open_dialogue(tokenizer, "own/model", "glm-4.5", [SCHEMA], None)
