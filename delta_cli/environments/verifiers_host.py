"""Environments of the package verifiers. They drive their episodes themselves, against a token endpoint of this run.

Each model call of an episode arrives as token ids at the endpoint and is drawn by the run's own sampler, in batches
with the calls of other episodes. The package's trace then says which ids were sampled and which ones the environment
wrote.
"""

from __future__ import annotations

import asyncio
import threading
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from backends.arrays import Ids
from backends.interface import Sampler, Sampling
from delta_cli.assets import context_of, model_path
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.dialogue import find_family
from delta_cli.environments.verifiers_trace import PlayedEpisode, failed, played
from delta_cli.errors import UserError
from delta_cli.recipe.environment import EnvironmentSection
from delta_cli.seeds import derive
from delta_cli.serving.endpoint_model import LONGEST_CONTEXT, EndpointModel
from delta_cli.serving.endpoints import Endpoints
from delta_cli.serving.http_server import HttpAnswer, HttpRequest, HttpServer
from delta_cli.serving.request_queue import RequestQueue

if TYPE_CHECKING:
    from verifiers.v1.env import Env
    from verifiers.v1.task import Task

SERVED_NAME = "policy"  # of the model, as environments see it
ANY_ID = 2**31  # the engine checks ids against its own vocabulary
STOP_SECONDS = 10.0
MOST_RESPONSES = 2**20  # that may wait; episodes are bounded by the batch


class VerifiersHost:
    """Plays the episodes of an environment for the model at ``model``, in a thread.

    A prompt and its response have at most ``context`` tokens. Raises UserError if the package or the environment cannot
    be loaded.
    """

    dialogue = None  # the environment renders chats itself

    def __init__(self, section: EnvironmentSection, tokenizer: Tokenizer, model: str, context: int) -> None:
        self._name, self._workers = str(section.id), section.workers
        self._env, self._tasks = load_tasks(section)
        self._tokenizer, self._model = tokenizer, model_path(model)
        self._context = min(context, context_of(self._model) or LONGEST_CONTEXT)
        self._renderer = None if section.renderer == "template" else find_family(model, section.renderer)
        self._queue = RequestQueue(MOST_RESPONSES)
        self._endpoints: Endpoints | None = None  # of the present rollout
        self.waited = 0.0  # seconds of the last rollout in which there was nothing to draw
        self._stack = ExitStack()

    def __enter__(self) -> VerifiersHost:
        server = HttpServer(self._answer, lambda line: None)
        port = self._stack.enter_context(server.running("127.0.0.1", 0))
        self._stack.callback(self._queue.close)
        self._client = _train_client(f"http://127.0.0.1:{port}/v1", self._model, self._renderer)
        self._stack.enter_context(_ServingTask(self._env))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        assert self._endpoints is not None
        return await self._endpoints.answer(request)

    def play(
        self,
        problems: Sequence[Problem],
        rows: Ids,
        sampling: Sampling,
        sampler: Sampler,
        interrupt: Callable[[], None],
        on_finished: Callable[[int, PlayedEpisode], None],
    ) -> list[PlayedEpisode]:
        """Play one episode of each problem; ``rows`` [R] determine its noise, with ``sampling.seed``.

        ``on_finished`` is called in this thread. Raises what ``interrupt`` raises.
        """
        model = EndpointModel(SERVED_NAME, self._tokenizer, ANY_ID, self._context, sampling.max_tokens)
        self._endpoints = Endpoints(model, self._queue)
        seeds = [derive(sampling.seed, row, "verifiers") for row in rows.tolist()]
        places = asyncio.Semaphore(self._workers)
        playing = [
            asyncio.run_coroutine_threadsafe(self._play(self._tasks[problem.id], sampling, seed, places), event_loop())
            for problem, seed in zip(problems, seeds, strict=True)
        ]
        found: dict[int, PlayedEpisode] = {}
        idle = self._queue.idle

        def done() -> bool:
            for place, episode in enumerate(playing):
                if place not in found and episode.done():
                    found[place] = episode.result()
                    on_finished(place, found[place])
            return len(found) == len(playing)

        for episode in playing:
            episode.add_done_callback(lambda _: self._queue.wake())
        try:
            self._queue.run(sampler, done, interrupt)
        finally:
            for episode in playing:
                episode.cancel()
        self.waited = self._queue.idle - idle
        return [found[place] for place in range(len(playing))]

    def refuse_if_all_failed(self, failures: Sequence[str | None]) -> None:
        """Raise UserError if several episodes, those of all ranks, failed for one reason."""
        if len(failures) > 1 and len(set(failures)) == 1 and failures[0] is not None:
            raise UserError(f"every episode of {self._name} failed: {failures[0]}")

    async def _play(self, task: Task[Any], sampling: Sampling, seed: int, places: asyncio.Semaphore) -> PlayedEpisode:
        """One episode, when one of the ``places`` is free."""
        from verifiers.v1.clients import ModelContext

        try:
            context = ModelContext(SERVED_NAME, self._client, _sampling_config(sampling, seed))
            async with places:
                return played(await self._env.run_episode(task, context))
        except Exception as error:  # an environment is a program and raises whatever it likes
            return failed(f"{type(error).__name__}: {error}")


@lru_cache(maxsize=1)
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all environments, in a thread: the package's locks belong to the first loop they meet."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="delta-verifiers", daemon=True).start()
    return loop


class _ServingTask:
    """Keeps the environment's own servers up."""

    def __init__(self, env: Env[Any]) -> None:
        self._env, self._started, self._stop = env, Future[None](), asyncio.Event()

    def __enter__(self) -> None:
        self._running = asyncio.run_coroutine_threadsafe(self._run(), event_loop())
        try:
            self._started.result()
        except Exception as error:
            raise UserError(f"{self._env.config.env_id}: the environment does not start ({error})") from error

    def __exit__(self, *_: object) -> None:
        event_loop().call_soon_threadsafe(self._stop.set)
        wait((self._running,), STOP_SECONDS)  # an environment that hangs does not hold up the end of the run

    async def _run(self) -> None:
        try:
            async with self._env.serving():
                self._started.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)


@lru_cache(maxsize=1)
def load_tasks(section: EnvironmentSection) -> tuple[Env[Any], dict[str, Task[Any]]]:
    """The environment and its tasks by their place. Raises UserError if they cannot be loaded."""
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise UserError(
            'environment.kind = "verifiers" needs the package verifiers; run: pip install '
            f"'delta-rlvr[verifiers]' ({error})"
        ) from error
    settings = {} if section.file is None else _settings(Path(section.file).expanduser())
    settings["taskset"] = {**settings.get("taskset", {}), "id": section.id}
    try:
        config = resolve_env_config(settings)
        limited = {
            name: agent.model_copy(update={"max_turns": min(agent.max_turns or section.turns, section.turns)})
            for name, agent in agent_config_fields(config).items()
        }
        env = load_environment(config.model_copy(update=limited))
        if not env.taskset.bounded:
            raise ValueError("its tasks never end")
        return env, {str(task.data.idx): task for task in env.taskset}
    except Exception as error:  # a plug-in is a program and raises whatever it likes
        raise UserError(f'environment.id = "{section.id}": {error}; install its package, or correct it') from error


def task_problems(section: EnvironmentSection) -> list[Problem]:
    """The tasks of an environment as problems, without gold answers. Raises UserError if they cannot be loaded."""
    _, tasks = load_tasks(section)
    return [
        Problem(place, task.data.prompt_text or task.data.name or f"task {place}", "", str(section.id))
        for place, task in tasks.items()
    ]


def _settings(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"environment.file: {file}: {error}; give a TOML file") from error


def _train_client(url: str, model: str, renderer: str | None) -> Any:
    from renderers.configs import config_from_name
    from verifiers.v1.clients import TrainClientConfig

    config = None
    if renderer is not None:
        try:
            config = config_from_name(renderer)
            if "thinking_retention" in type(config).model_fields:  # else a new user turn removes sampled tokens
                config = config.model_copy(update={"thinking_retention": "all"})
        except ValueError as error:
            raise UserError(f'environment.renderer = "{renderer}": {error}') from error
    return TrainClientConfig(base_url=url, api_key_var="DELTA_NO_KEY", renderer=config, renderer_model_name=model)


def _sampling_config(sampling: Sampling, seed: int) -> Any:
    """The run's sampling; the server limits the tokens of a turn."""
    from verifiers.v1.types import SamplingConfig

    settings: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    settings |= {"top_k": sampling.top_k, "min_p": sampling.min_p}
    if sampling.stop is not None:
        settings["stop"] = list(sampling.stop.strings)
    return SamplingConfig.model_validate(settings)
