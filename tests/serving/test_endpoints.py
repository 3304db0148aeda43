"""What the endpoints answer: the sampler's own tokens and log-probabilities, in the forms that clients read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends import registry
from backends.interface import Engine, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.data.prompts import BOXED
from delta_cli.data.tokenizer import Tokenizer

from .server import CHAT, COMPLETIONS, GENERATE, Client, serving

QUESTION = "45+84=?"


def generate(client: Client, ids: list[int], **params: Any) -> list[dict[str, Any]]:
    status, answer = client.ask(GENERATE, {"model": "tiny", "token_ids": ids, "sampling_params": params})
    assert status == 200, answer
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def requests(tokenizer: Tokenizer, count: int) -> list[dict[str, Any]]:
    """Requests of every kind of setting; half of them ask for log-probabilities."""
    found = []
    for index in range(count):
        params: dict[str, Any] = {"seed": index % 17, "max_tokens": (8, 16)[index % 2], "n": 1 + index % 3 // 2}
        params |= ({}, {"temperature": 0.5}, {"top_p": 0.9, "logprobs": 1}, {"top_k": 3, "logprobs": 1})[index % 4]
        prompt = tokenizer.encode(f"{index}+{index * 7 % 90}=?\n").tolist()
        found.append({"token_ids": prompt, "sampling_params": params})
    return found


def test_fifty_requests_at_once_get_the_tokens_that_each_gets_alone(client: Client, tokenizer: Tokenizer) -> None:
    asked = requests(tokenizer, 50)
    together = client.ask_all(GENERATE, asked)
    alone = [client.ask(GENERATE, body) for body in asked]
    assert {status for status, _ in together} == {200}
    for (_, one), (_, other) in zip(together, alone, strict=True):
        for first, second in zip(one["choices"], other["choices"], strict=True):
            assert first["token_ids"] == second["token_ids"]
            assert first["finish_reason"] == second["finish_reason"]
            if first["logprobs"] is not None:
                numbers = [[each["logprob"] for each in choice["logprobs"]["content"]] for choice in (first, second)]
                np.testing.assert_allclose(*numbers, atol=1e-6)


def test_the_log_probabilities_are_those_of_a_forward_pass(
    client: Client, engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(QUESTION + "\n")
    for temperature in (1.0, 0.7):
        (choice,) = generate(client, prompt.tolist(), seed=3, temperature=temperature, logprobs=1, max_tokens=20)
        tokens = np.array(choice["token_ids"])
        names = [each["token"] for each in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in tokens]  # as the client of `renderers` checks
        scored = engine.score(Sequences((prompt,), tokens, np.array([0, len(tokens)]), temperature))
        np.testing.assert_allclose(
            [each["logprob"] for each in choice["logprobs"]["content"]], scored.logprobs, atol=1e-5
        )


def test_a_response_ends_as_the_sampler_ends_it(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(QUESTION + "\n").tolist()
    (whole,) = generate(client, prompt, seed=1, max_tokens=40)
    assert whole["finish_reason"] == "stop"
    assert whole["token_ids"][-1] in tokenizer.eos_ids  # it is the model's own token and counts
    (cut,) = generate(client, prompt, seed=1, max_tokens=5)
    assert (cut["token_ids"], cut["finish_reason"]) == (whole["token_ids"][:5], "length")
    stop = whole["token_ids"][7]
    (stopped,) = generate(client, prompt, seed=1, max_tokens=40, stop_token_ids=[stop])
    assert stopped["token_ids"] == whole["token_ids"][: whole["token_ids"].index(stop) + 1]
    assert stopped["finish_reason"] == "stop"
    (past,) = generate(client, prompt, seed=1, max_tokens=40, ignore_eos=True)
    assert past["token_ids"][: len(whole["token_ids"])] == whole["token_ids"]
    assert len(past["token_ids"]) == 40


def test_without_a_seed_every_request_is_drawn_anew(client: Client) -> None:
    drawn = {tuple(generate(client, [20, 21], max_tokens=20)[0]["token_ids"]) for _ in range(4)}
    assert len(drawn) > 1
    with_seed = [generate(client, [20, 21], max_tokens=20, seed=-5, n=3) for _ in range(2)]
    assert with_seed[0] == with_seed[1]
    assert len({tuple(choice["token_ids"]) for choice in with_seed[0]}) > 1


def test_chat_and_completions_are_the_text_of_the_same_tokens(client: Client, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    body = {"messages": messages, "seed": 1, "max_completion_tokens": 40, "logprobs": True, "return_token_ids": True}
    status, chat = client.ask(CHAT, body)
    assert status == 200, chat
    prompt = tokenizer.encode(tokenizer.converse([{"role": "user", "content": QUESTION}]), special=False).tolist()
    assert chat["prompt_token_ids"] == prompt
    (choice,) = chat["choices"]
    assert choice["token_ids"] == generate(client, prompt, seed=1, max_tokens=40)[0]["token_ids"]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(choice["token_ids"])}
    assert "".join(each["token"] for each in choice["logprobs"]["content"]) == tokenizer.decode(
        choice["token_ids"], skip_special=False
    )
    assert chat["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": len(prompt) + len(choice["token_ids"]),
    }
    text = tokenizer.decode(prompt)
    for given in (text, prompt):
        status, completion = client.ask(COMPLETIONS, {"prompt": given, "seed": 1, "max_tokens": 40, "logprobs": 0})
        assert status == 200, completion
        assert completion["choices"][0]["text"] == choice["message"]["content"]
        offsets = completion["choices"][0]["logprobs"]["text_offset"]
        assert offsets[:3] == [0, 1, 2]
        assert len(offsets) == len(completion["choices"][0]["logprobs"]["token_logprobs"])


def test_several_prompts_are_answered_in_order(client: Client) -> None:
    prompts = ["1+1=?\n", "45+84=?\n", "1+1=?\n"]
    _, together = client.ask(COMPLETIONS, {"prompt": prompts, "seed": 2, "n": 2, "max_tokens": 30})
    alone = [client.ask(COMPLETIONS, {"prompt": each, "seed": 2, "n": 2, "max_tokens": 30})[1] for each in prompts]
    texts = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == texts
    assert [choice["index"] for choice in together["choices"]] == list(range(6))


def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    _, answer = client.ask(COMPLETIONS, {"prompt": QUESTION + "\n", "seed": 1, "max_tokens": 40, "stop": [" ", "box"]})
    _, whole = client.ask(COMPLETIONS, {"prompt": QUESTION + "\n", "seed": 1, "max_tokens": 40})
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"].split(" ")[0]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_stream_ends_with_done_and_holds_the_whole_answer(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": 1, "max_tokens": 40, "n": 2}
    _, whole = client.ask(CHAT, body)
    _, streamed = client.ask(CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})
    *events, done = [line.removeprefix("data: ") for line in streamed.decode().split("\n\n") if line]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    assert last["usage"] == whole["usage"]
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 2
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [choice["message"] for choice in whole["choices"]]
    _, text = client.ask(COMPLETIONS, {"prompt": QUESTION + "\n", "seed": 1, "max_tokens": 40, "stream": True})
    first = json.loads(text.decode().split("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["text"] == whole["choices"][0]["message"]["content"]


def test_models_and_health(client: Client) -> None:
    assert client.ask("/health") == (200, {"status": "ok"})
    _, models = client.ask("/v1/models?x=1")
    (card,) = models["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 128)


def test_a_question_is_asked_in_the_template_of_the_run(engine: Engine, tokenizer: Tokenizer) -> None:
    with serving(engine, tokenizer, engine.vocabulary, template=BOXED + "\n") as client:
        asked = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4, "return_token_ids": True}
        _, answer = client.ask(CHAT, asked)
        assert tokenizer.decode(answer["prompt_token_ids"]) == BOXED.replace("{question}", "1+1") + "\n"
        talk = [{"role": role, "content": "2"} for role in ("user", "assistant", "user")]
        _, answer = client.ask(CHAT, asked | {"messages": talk})
        assert tokenizer.decode(answer["prompt_token_ids"]) == tokenizer.converse(talk)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.long)])
def test_other_engines_serve_the_tokens_of_their_own_rollout(backend: str, tokenizer: Tokenizer) -> None:
    pytest.importorskip("torch" if backend == "cpu" else "mlx_lm")
    engine = registry.create(backend, BackendSettings.of(model_path("tiny-base"), frozen=True, threads=1))
    asked = requests(tokenizer, 6)
    with serving(engine, tokenizer, engine.vocabulary) as client:
        together = client.ask_all(GENERATE, asked)
        alone = [client.ask(GENERATE, body) for body in asked]
    for (_, one), (_, other) in zip(together, alone, strict=True):
        assert [each["token_ids"] for each in one["choices"]] == [each["token_ids"] for each in other["choices"]]
    greedy = Sampling(12, tokenizer.eos_ids, temperature=0.0)
    prompt = tokenizer.encode(QUESTION + "\n")
    drawn = engine.rollout(RolloutRequest((prompt,), replace(greedy, seed=99)))
    with serving(engine, tokenizer, engine.vocabulary) as client:
        (choice,) = generate(client, prompt.tolist(), temperature=0, max_tokens=12, logprobs=1)
    assert choice["token_ids"] == drawn.tokens.tolist()
    engine.close()
