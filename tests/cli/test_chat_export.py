"""``delta chat``, and what ``delta export`` makes besides a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner, Result

from backends.interface import Completions, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.cli import app
from delta_cli.data.tokenizer import Tokenizer as OurTokenizer
from delta_cli.errors import UserError
from delta_cli.evaluation.conversation import Conversation
from delta_cli.publishing import publish
from delta_cli.publishing.card import card, licence_of

SUM = "12+34=?"


def delta(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=typed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sums"
    keys = ["run.steps=2", "rollout.prompts=4", "rollout.responses=4", "evaluation.problems=8", "data.limit=99"]
    settings = [part for key in keys for part in ("--set", key)]
    result = delta("train", "--backend", "fake", "--run-dir", str(folder), "--quiet", *settings)
    assert result.exit_code == 0, result.output
    return folder


def test_a_run_is_asked_as_it_was_trained(run: Path) -> None:
    """Its template makes sums of what is typed; the same seed answers alike, question by question."""
    asked = delta("chat", str(run), "--backend", "fake", "--temperature", "0", "--prompt", SUM, "--prompt", "10+20=?")
    assert asked.exit_code == 0, asked.output
    first, second = asked.stdout.splitlines()
    assert first.startswith("2+4=6")
    assert "boxed" in second
    typed = delta("chat", str(run), "--backend", "fake", "--temperature", "0", typed=f"{SUM}\n10+20=?\n\nnever asked\n")
    assert typed.stdout.splitlines() == [first, second]


def test_a_run_is_asked_with_its_stop_strings_and_system_message(run: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(run, own)
    ask = ("--backend", "fake", "--temperature", "0", "--prompt", SUM)
    whole = delta("chat", str(own), *ask).stdout
    assert whole.startswith("2+4=6 ")
    recipe = (own / "recipe.toml").read_text()
    (own / "recipe.toml").write_text(recipe.replace("stop = []", 'stop = ["=6"]'))
    assert delta("chat", str(own), *ask).stdout == "2+4\n"
    (own / "recipe.toml").write_text(recipe.replace("[data]", '[data]\nsystem = "9"'))
    assert delta("chat", str(own), *ask).stdout != whole, "the message is part of the prompt"


def test_an_answer_that_is_cut_says_so(run: Path) -> None:
    cut = delta("chat", str(run), "--backend", "fake", "--max-tokens", "3", "--prompt", SUM)
    assert "cut at 3 tokens" in cut.stderr


@pytest.mark.parametrize("only", [("--top-k", "1"), ("--min-p", "1"), ("--top-p", "0.000001")])
def test_what_truncates_to_one_token_takes_the_likeliest(run: Path, only: tuple[str, str]) -> None:
    ask = ("chat", str(run), "--backend", "fake", "--max-tokens", "16", "--prompt", SUM)
    assert delta(*ask, "--temperature", "5", *only).stdout == delta(*ask, "--temperature", "0").stdout
    assert delta(*ask, "--temperature", "5").stdout != delta(*ask, "--temperature", "0").stdout


def test_sampling_is_a_function_of_the_seed(run: Path) -> None:
    def ask(seed: int) -> str:
        arguments = ["--temperature", "3", "--max-tokens", "12", "--seed", str(seed)]
        return delta("chat", str(run), "--backend", "fake", *arguments, "--prompt", SUM, "--prompt", SUM).stdout

    assert ask(1) == ask(1) != ask(2)
    once, again = ask(1).splitlines()[:2]
    assert once != again, "each answer has noise of its own"


class Parrot:
    """A sampler that answers with its prompt's last characters."""

    version = 0

    def __init__(self, tokenizer: OurTokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[str] = []

    def rollout(self, request: RolloutRequest, on_finished: Any = None) -> Any:
        self.prompts.append(self.tokenizer.decode(request.prompts[0], skip_special=False))
        tokens = self.tokenizer.encode("46", special=False)
        starts = np.array([0, len(tokens)])
        return Completions(tokens, starts, np.zeros(len(tokens)), np.array([False]), 0)


def test_a_conversation_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's chat template, what was said before is in the prompt; in a template of training it is not."""
    tokenizer = OurTokenizer.load(model_path("tiny-base"))
    tokenizer._template = "{% for m in messages %}{{ m.role[0] }}={{ m.content }}+{% endfor %}"
    sampling = Sampling(5, tokenizer.eos_ids)
    parrot = Parrot(tokenizer)
    talk = Conversation(parrot, tokenizer, None, sampling, system="1")  # type: ignore[arg-type]
    assert talk.ask("2") == ("46", False)
    talk.ask("3")
    assert [[part for part in prompt if part.isdigit()] for prompt in parrot.prompts] == [
        ["1", "2"],
        ["1", "2", "4", "6", "3"],
    ]
    alone = Conversation(parrot, tokenizer, "{question}=", sampling)  # type: ignore[arg-type]
    for _ in range(2):
        alone.ask("7")
    assert parrot.prompts[2] == parrot.prompts[3] == "7="


def test_a_card_says_what_the_run_wrote_down(run: Path, tmp_path: Path) -> None:
    done = delta("eval", str(run), "--backend", "fake", "--limit", "4")
    assert done.exit_code == 0, done.output
    exported = delta("export", str(run), str(tmp_path / "out"), "--backend", "fake")
    assert exported.exit_code == 0, exported.output
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    assert "# out" in text
    assert "`tiny-base` after 2 steps" in text
    assert "method `delta`, the whole model" in text
    for record in map(json.loads, (run / "evaluations.jsonl").read_text().splitlines()):
        assert f"| {record['step']} | {record['accuracy']:.1%} |" in text
    assert "## Evaluations" in text
    assert "steps = 2" in text
    assert "## Evaluations" not in card(run, 1, "other", None), "they are of step 2"


def test_licences_of_base_models(tmp_path: Path) -> None:
    assert licence_of("tiny-base") == "apache-2.0"
    assert licence_of(str(tmp_path)) is None
    for text, known in (
        ("---\nlanguage: en\nlicense: 'mit'\n---\nlicense: no\n", "mit"),
        ("license: mit\n", None),
        ("---\nlicense: mit\n", None),
        ("---\ntags: []\n---\nlicense: mit\n", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert licence_of(str(tmp_path)) == known, text


class Hub:
    """Records what is asked of the hub, or refuses."""

    refuses: Exception | None = None
    login: Exception | None = None
    asked: list[tuple[Any, ...]]

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        if self.refuses:
            raise self.refuses
        self.asked.append(("create", name, private, exist_ok))
        return f"https://hub/{name}"

    def whoami(self) -> dict[str, Any]:
        if self.login:
            raise self.login
        return {"name": "me", "orgs": [{"name": "us"}]}

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.asked.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


def test_push(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private unless --public; the card has the hub's name; a refusal is one line, and the model stays."""
    Hub.asked = []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    done = delta("export", str(run), str(tmp_path / "a"), "--backend", "fake", "--push", "me/sums")
    assert done.exit_code == 0, done.output
    assert "uploaded to https://hub/me/sums" in done.output
    assert Hub.asked[0] == ("create", "me/sums", True, True)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(Hub.asked[1][2])
    assert "# me/sums" in (tmp_path / "a" / "README.md").read_text()
    publish.upload(tmp_path / "a", "me/sums", public=True)
    assert Hub.asked[2] == ("create", "me/sums", False, True)
    Hub.refuses = OSError("401: who are you?\nmore")
    with pytest.raises(UserError, match=r"the hub does not take it \(401: who are you\?\).*hf auth login"):
        publish.upload(tmp_path / "a", "me/sums", public=False)
    Hub.refuses = None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--quantise", "5"], "choose one of 2, 3, 4, 6, 8 bits"),
        (["--push", "nowhere"], "owner/name"),
        (["--public"], "give --push"),
    ],
)
def test_options_that_cannot_be(options: list[str], why: str, run: Path, tmp_path: Path) -> None:
    refused = delta("export", str(run), str(tmp_path / "out"), "--backend", "fake", *options)
    assert isinstance(refused.exception, UserError)
    assert why in str(refused.exception)
    assert not list(tmp_path.iterdir())


def test_an_export_of_few_bits_is_what_mlx_lm_makes_of_it(run: Path, tmp_path: Path) -> None:
    """It opens in mlx-lm, close to the model of full precision, and delta chat draws from it."""
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    from mlx_lm.utils import load_model

    from backends import registry

    done = delta("export", str(run), str(tmp_path / "q"), "--backend", "fake", "--quantise", "8")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q"]
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization"]["bits"] == 8
    assert "library_name: mlx\n" in (tmp_path / "q" / "README.md").read_text()
    assert json.loads((tmp_path / "q" / "delta.json").read_text())["step"] == 2
    load_model(tmp_path / "q")
    engine = registry.create("mlx", BackendSettings.of(str(tmp_path / "q"), frozen=True))
    whole = registry.create("fake", BackendSettings.of(str(run / "model")))
    ids = OurTokenizer.load(str(run / "model")).encode("12+34=?\n2+4=6 1+3+0=4")
    sequences = Sequences((ids[:8],), ids[8:], np.array([0, len(ids) - 8]))
    gap = np.abs(engine.score(sequences).logprobs - whole.score(sequences).logprobs).max()
    engine.close()
    assert 0 < gap < 0.2
    asked = delta("chat", str(tmp_path / "q"), "--backend", "mlx", "--temperature", "0", "--prompt", SUM)
    assert asked.stdout.startswith("2+4=6"), asked.output


def test_gguf(run: Path, tmp_path: Path) -> None:
    """Of a run, and of a Llama with a SentencePiece tokenizer as mlx-lm writes it."""
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    import transformers

    from backends import registry

    exported = delta("export", str(run), str(tmp_path / "out"), "--backend", "fake", "--gguf")
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "out/model.gguf").read_bytes()[:4] == b"GGUF"
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "llama")
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(3)} | {chr(97 + i): 3 + i for i in range(20)}
    Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="a")).save(
        str(tmp_path / "llama/tokenizer.json")
    )
    (tmp_path / "llama/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    registry.converter("mlx").gguf(tmp_path / "llama", tmp_path / "model.gguf")
    weights = mx.load(str(tmp_path / "model.gguf"))
    found = np.array(weights["output.weight"]).astype(np.float32)
    np.testing.assert_allclose(found, model.lm_head.weight.detach().numpy(), atol=1e-3)
    assert weights["blk.0.attn_q.weight"].shape == (32, 32)


def test_push_looks_at_the_login_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub.asked = []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    for login, name, part in (
        (OSError("Token is required, but no token found.\nmore"), "me/a", "does not take it (Token is required, but"),
        (None, "them/a", "the login is me, which cannot write to them; choose me/NAME"),
    ):
        monkeypatch.setattr(Hub, "login", login)
        refused = delta("export", str(run), str(tmp_path / "out"), "--backend", "fake", "--push", name)
        assert isinstance(refused.exception, UserError)
        assert part in str(refused.exception)
    assert not list(tmp_path.iterdir())
    assert Hub.asked == []
    monkeypatch.setattr(Hub, "login", None)
    done = delta("export", str(run), str(tmp_path / "b"), "--backend", "fake", "--push", "us/sums")
    assert done.exit_code == 0, done.output
