"""The checks of ``delta doctor``, cheapest first: machine, memory, tokenizer, data, model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from backends import registry
from backends.interface import BackendError
from delta_cli.data.load_report import LoadedData
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import dropped_turns, encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.doctor.deadline import Deadline
from delta_cli.doctor.finding import Finding, gib
from delta_cli.doctor.fit import MachineMemory, fitting_overrides
from delta_cli.doctor.mac import WATCHDOG_SECONDS, longest_operation
from delta_cli.doctor.machine import Machine, describe_machine
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase, peak_bytes
from delta_cli.doctor.model_checks import model_findings
from delta_cli.doctor.model_shape import ModelShape, shape_of
from delta_cli.doctor.reward_model_memory import unknown_reward_models
from delta_cli.errors import NotFetchedError, UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.environment import SHIPPED_ENVIRONMENTS
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.text import count
from delta_cli.training.setup import (
    GOLD_SAMPLE,
    check_files,
    check_functions,
    gold_notices,
    load_benchmarks,
    load_data,
    load_tokenizer,
    make_grader,
)

SECONDS = 120.0  # for running the model
PROMPT_SHOWN = 600  # characters of the first prompt
VLLM_SHARE = 0.9  # of a GPU's memory, which a vLLM server takes by default


def examine(
    recipe: Recipe,
    backend: str,
    run_model: bool,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Finding]:
    """Yield every finding as soon as it is made.

    ``run_model`` loads the model and times it for at most ``seconds``; ``say`` announces each long check before it
    begins. If weights or data are only not downloaded yet, the check is a note and not an error.
    """
    name = registry.default() if backend == "auto" else backend
    machine = describe_machine(name)
    yield from _memory(recipe, machine, name)
    for finding in _machine(machine, name):
        run_model = run_model and finding.level != "wrong"
        yield finding
    try:
        check_files(recipe)
    except UserError as error:
        yield _not_checked("credit and reward files", error)
        return
    try:
        tokenizer = load_tokenizer(recipe)
    except UserError as error:
        yield _not_checked("tokenizer", error)
        return
    yield from _tokenizer(recipe, tokenizer)
    try:
        data = load_data(recipe, tokenizer)
        load_benchmarks(recipe, data)
    except UserError as error:
        yield _not_checked("data", error)
        return
    yield _prompt(recipe, tokenizer, data.problems[0])
    if recipe.environment.used:
        yield _episodes(recipe)
    with ExitStack() as stack:
        try:
            grader = stack.enter_context(make_grader(recipe))
            check_functions(grader, data.problems[0])
        except UserError as error:
            yield Finding("wrong", "reward", str(error))
            return
        yield from _data(recipe, data, grader)
        if run_model:
            yield from model_findings(recipe, name, tokenizer, data, grader.verifying, Deadline(seconds, say))


def _not_checked(subject: str, error: UserError) -> Finding:
    return Finding("note" if isinstance(error, NotFetchedError) else "wrong", subject, f"not checked: {error}")


def _machine(machine: Machine, backend: str) -> Iterator[Finding]:
    yield Finding("ok", "system", f"{machine.system}, {machine.cores} cores, {gib(machine.memory)} of memory")
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    try:
        registry.check_installation(backend)
    except BackendError as error:
        yield Finding("wrong", "backend", str(error))
        return
    if machine.device_memory:
        yield Finding("ok", "backend", f"{backend} on {machine.device}, {gib(machine.device_memory)}")
    else:
        yield Finding("wrong", "backend", f"{backend}: {machine.device}; choose --backend cpu")


def _memory(recipe: Recipe, machine: Machine, backend: str) -> Iterator[Finding]:
    try:
        shape, config = shape_of(recipe.model.path)
    except UserError as error:
        yield Finding("note", "memory", f"not estimated: {error}")
        return
    memory = MachineMemory(shape, config, machine, backend)
    layout, items = memory.layout(recipe), sorted(memory.items(recipe), key=lambda item: -item.bytes)
    advice = _advice(recipe, memory)
    total, host = peak_bytes(items), bytes_by_phase(items)["host"] * layout.processes
    if backend != "cuda":  # host memory is the device's memory, and all processes share it
        yield _fits("memory", items, total * layout.processes + host, machine.device_memory, advice)
    else:
        yield _fits("memory", [item for item in items if item.phase != "host"], total, machine.device_memory, advice)
        if recipe.engine.colocated and machine.device_memory:
            yield _shared(recipe, bytes_by_phase(items)["stays"], machine.device_memory)
        if host:
            on_host = [item for item in items if item.phase == "host"]
            yield _fits("memory, host", on_host, host, machine.memory, advice)
    for item in items:
        if item.bytes:
            yield Finding("ok", f"memory, {item.phase}", f"{gib(item.bytes):>10}  {item.name}: {item.how}")
    for line in unknown_reward_models(recipe):
        yield Finding("note", "memory", line)
    if backend == "mlx" and machine.system.startswith("Darwin"):
        yield _watchdog(recipe, shape)


def _watchdog(recipe: Recipe, shape: ModelShape) -> Finding:
    """Whether one operation holds the GPU longer than macOS allows while a display is on."""
    key, seconds = longest_operation(recipe, shape)
    text = f"the longest operation of an update takes {seconds:.2f} s on an M1, less on a faster chip"
    if seconds < WATCHDOG_SECONDS:
        return Finding("ok", "watchdog", text)
    return Finding(
        "note",
        "watchdog",
        f"{text}; macOS may end it while a display is on: lower {key}, or run under caffeinate -i and let the display "
        "sleep (docs/mac.md)",
    )


def _shared(recipe: Recipe, stays: int, available: int) -> Finding:
    """Whether a vLLM server fits on the GPU beside the memory that the trainer keeps while the server draws."""
    share = recipe.engine.memory or VLLM_SHARE
    both = f"engine.memory = {share:g} is {gib(int(share * available))}, and the trainer keeps {gib(stays)}"
    if share * available + stays <= available:
        return Finding("ok", "memory, shared", f"{both}, of {gib(available)}")
    fitting = max(0.0, (available - stays) / available - 0.05)
    return Finding(
        "wrong", "memory, shared", f"{both}: too much for {gib(available)}; set engine.memory = {fitting:.2f}"
    )


def _advice(recipe: Recipe, memory: MachineMemory) -> str:
    """The keys that make a recipe fit; empty if it fits, or if no such keys suffice."""
    known = memory.machine.device_memory > 0
    overrides = fitting_overrides(recipe, memory.excess, memory.separate) if known else None
    return (
        f"It fits with: --set {' --set '.join(overrides)}, which delta train sets if --fit is given"
        if overrides
        else ""
    )


def _fits(subject: str, items: Sequence[MemoryItem], total: int, available: int, advice: str) -> Finding:
    """Whether ``total`` bytes are available; if not, ``advice``, or else how to make the largest items smaller."""
    if not available:
        return Finding("note", subject, f"about {gib(total)} at the worst moment")
    if total <= available:
        return Finding("ok", subject, f"about {gib(total)} at the worst moment, of {gib(available)}")
    advice = advice or "; ".join(f"{item.name}: {item.remedy}" for item in [item for item in items if item.remedy][:3])
    return Finding(
        "wrong", subject, f"about {gib(total)} at the worst moment, but only {gib(available)} is available. {advice}"
    )


def _tokenizer(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Finding]:
    ends = ", ".join(
        f"{piece!r} ({i})"
        for piece, i in zip(tokenizer.pieces(list(tokenizer.eos_ids)), tokenizer.eos_ids, strict=True)
    )
    yield Finding(
        "ok", "tokenizer", f"{tokenizer.vocab_size} tokens; a response ends with {ends}; padding is {tokenizer.pad_id}"
    )
    shape, _ = shape_of(recipe.model.path)
    if shape.vocabulary < tokenizer.vocab_size:
        yield Finding(
            "wrong",
            "vocabulary",
            f"the model has {shape.vocabulary} rows for {tokenizer.vocab_size} tokens; the tokenizer belongs to "
            "another model",
        )
    elif shape.vocabulary > tokenizer.vocab_size:
        yield Finding(
            "ok", "vocabulary", f"padded to {shape.vocabulary} rows; ids beyond the tokenizer decode to \\ufffd"
        )


def _prompt(recipe: Recipe, tokenizer: Tokenizer, problem: Problem) -> Finding:
    """The prompt of a problem, as the model gets it."""
    prompt = encode_prompt(problem, recipe.data.prompt_template, tokenizer)
    text = tokenizer.decode(prompt, skip_special=False)
    shown = text if len(text) <= PROMPT_SHOWN else f"{text[: PROMPT_SHOWN // 2]} … {text[-PROMPT_SHOWN // 2 :]}"
    return Finding("ok", "prompt", f"{shown!r}, {count(len(prompt), 'token')}, from problem {problem.id}")


def _episodes(recipe: Recipe) -> Finding:
    """How much of an episode its environment can take. Memory and time count whole episodes."""
    environment, rollout = recipe.environment, recipe.rollout
    if environment.kind == "verifiers":
        longest = rollout.max_prompt_tokens + rollout.max_tokens
        return Finding("ok", "episodes", f"conversations of at most {longest:,} tokens, which memory and time count")
    limit = f"rollout.max_tokens = {rollout.max_tokens:,}"
    if environment.file in SHIPPED_ENVIRONMENTS:
        return Finding("ok", "episodes", f"{limit} holds what the model and the calculator write")
    answers = environment.turns - 1
    most = answers * environment.observation_tokens
    what = f"answers of the environment take at most {answers} × {environment.observation_tokens:,} = {most:,} tokens"
    if most < rollout.max_tokens:
        return Finding("ok", "episodes", f"{what} of {limit}, which memory and time count")
    return Finding(
        "note",
        "episodes",
        f"{what}, and {limit} holds these and what the model writes: long answers cut episodes off before their "
        "last turn; raise rollout.max_tokens, or lower environment.observation_tokens or environment.turns",
    )


def _data(recipe: Recipe, data: LoadedData, grader: WeightedReward) -> Iterator[Finding]:
    yield Finding("ok", "data", f"{data.report}; {len(data.problems)} to train on, {len(data.held_out)} held out")
    if line := dropped_turns(recipe.data.prompt_template, data.problems):
        yield Finding("note", "data", line)
    if all(term.grader.reward.kind != "math" for term in grader.terms):
        return
    refused = gold_notices(data, grader)
    for line in refused:
        yield Finding("wrong", "verifier", line)
    if not refused:
        count = min(GOLD_SAMPLE, len(data.problems))
        yield Finding("ok", "verifier", f"{count} gold answers accepted as answers to themselves")
