"""Opens vLLM servers for a run, which publishes its weights to them, or for an evaluation."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from backends.collective import SOLO, from_first
from backends.interface import Collective, Engine
from backends.settings import EngineSection, Lora
from backends.vllm import ServedModel, ServerLauncher, VllmSampler
from backends.vllm.launcher import OnNotice
from delta_cli.assets import context_of, model_path
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.rollout import memory_inbox


@contextmanager
def open_training_servers(
    recipe: Recipe, learner: Engine, run_dir: Path, on_notice: OnNotice, ranks: Collective = SOLO
) -> Iterator[VllmSampler]:
    """Servers that draw from the weights that the learner publishes. Every rank opens them."""
    engine = recipe.engine
    refuse_unreachable(engine, ranks)
    with ExitStack() as stack:
        bytes_needed = learner.parameters * (2 if recipe.model.dtype != "float32" else 4)
        bytes_needed *= (
            max(engine.async_steps, 1) + engine.in_flight
        )  # a folder for each version that waits to be loaded
        inbox = from_first(ranks, _inbox(recipe, run_dir, bytes_needed, stack) if ranks.rank == 0 else None)
        longest = max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0)
        lora = _published_adapters(recipe)
        served = ServedModel(
            path=model_path(recipe.model.path),
            dtype=recipe.model.dtype,
            max_tokens=recipe.rollout.max_prompt_tokens + longest,
            lora_rank=lora.rank if lora else None,
        )
        sampler = VllmSampler(
            engine,
            _launcher(engine, served, run_dir / "vllm.log", on_notice, ranks),
            inbox=inbox,
            log=run_dir / "vllm.log",
            dtype=recipe.model.dtype,
            vocabulary=learner.vocabulary,
            ranks=ranks,
            on_notice=on_notice,
        )
        stack.callback(sampler.close)
        if not engine.launch:  # our own server starts on the first weights
            sampler.connect()
        yield sampler


@contextmanager
def open_evaluation_servers(
    engine: EngineSection, model: str, max_tokens: int, log: Path, on_notice: OnNotice
) -> Iterator[VllmSampler]:
    """Servers of a model as it is on disk, in the type it was saved in; one of ours ends on leaving."""
    launcher = _launcher(engine, ServedModel(model, "auto", max_tokens), log, on_notice, SOLO)
    sampler = VllmSampler(engine, launcher, on_notice=on_notice)
    with ExitStack() as stack:
        stack.callback(sampler.close)
        sampler.connect(model)
        yield sampler


def _launcher(
    engine: EngineSection, served: ServedModel, log: Path, on_notice: OnNotice, ranks: Collective
) -> ServerLauncher | None:
    """What starts our own server, for sequences that the model can read; None if others have started servers."""
    if not engine.launch:
        return None
    limit = min(served.max_tokens, context_of(served.path) or served.max_tokens)  # vLLM refuses one beyond the model's
    served = ServedModel(served.path, served.dtype, limit, served.lora_rank)
    launcher = ServerLauncher(served, engine, log, on_notice)
    if ranks.rank == 0:
        launcher.check()
    return launcher


def refuse_unreachable(engine: EngineSection, ranks: Collective) -> None:
    """Raise UserError if servers cannot read the weights, or some rank cannot reach a server.

    Weights are published by the first rank: without engine.inbox in its machine's memory or on its disk.
    """
    if engine.in_flight and ranks.size > 1:
        raise UserError(
            f"engine.in_flight works with one training process, and there are {ranks.size}; set "
            "engine.in_flight = false"
        )
    hosts = {url: urlsplit(url).hostname or "" for url in engine.url}
    machines = ranks.gather(_machine())
    elsewhere = sum(machine != machines[0] for machine in machines)
    if elsewhere and engine.launch:
        raise UserError(
            f"engine.launch starts a server that only its own machine can reach, but {elsewhere} of {ranks.size} ranks "
            "run on other machines; start vLLM servers (docs/vllm.md), name them in engine.url, and set engine.inbox "
            "to a folder that they can read"
        )
    for url, host in hosts.items():
        if elsewhere and _is_loopback(host):
            raise UserError(
                f"engine.url: {url} is another server on each machine, and ranks run on several; write the address "
                "under which every machine reaches it"
            )
    away = next((url for url, host in hosts.items() if not _is_here(host)), None) if ranks.rank == 0 else None
    away = from_first(ranks, away)
    if away and engine.inbox is None and engine.transfer == "folder":
        raise UserError(
            f"engine.url: {away} is on another machine, which cannot read weights from this one's memory; set "
            'engine.inbox to a folder on a disk that this machine and the servers share, or engine.transfer = "nccl"'
        )


def _machine() -> str:
    """A name of this machine that no other has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_here(host: str) -> bool:
    """Whether a host name is this machine's: a socket can be bound to its address. A name nobody knows counts as here,
    because asking the server gives the better error."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _published_adapters(recipe: Recipe) -> Lora | None:
    """The adapters that servers get alone; None if they get the whole model, as they do over NCCL or in flight."""
    return recipe.model.published_adapters if recipe.engine.takes_adapters else None


def _inbox(recipe: Recipe, run_dir: Path, size: int, stack: ExitStack) -> Path:
    """A folder for weights of ``size`` bytes that this machine's servers can read; one in memory goes with the run."""
    if recipe.engine.inbox is not None:
        kind = "adapters" if _published_adapters(recipe) else "model"
        return Path(recipe.engine.inbox).expanduser().resolve() / kind
    memory_inbox.sweep()
    if os.access(memory_inbox.MEMORY, os.W_OK) and shutil.disk_usage(memory_inbox.MEMORY).free > 2 * size:
        return stack.enter_context(memory_inbox.opened())
    return (run_dir / "weights").resolve()
