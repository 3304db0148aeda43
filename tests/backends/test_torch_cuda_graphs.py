"""Recorded and replayed functions: padded rows and columns, which are never read, change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from backends.interface import Completions, Proxy, RolloutRequest, Sampling
from backends.torch import cuda_graphs, rollout
from backends.torch.backend import TorchEngine
from backends.torch.cache import KeyValueCache
from backends.torch.cuda_graphs import GraphRunner
from delta_cli.training.metrics import describe_process, describe_ranks
from tests.device import DEVICE

REQUEST = RolloutRequest(
    tuple(np.random.default_rng(5).integers(1, 31, size) for size in (60, 9, 1, 5, 3)),
    Sampling(max_tokens=40, stop_ids=(0, 7), samples=4, seed=3),
    entropies=True,
    proxy=Proxy(),
)


class Replay:
    """Stands for a CUDA graph: computes again from and to the recorded buffers, whatever has changed since."""

    def __init__(self, caches: list[KeyValueCache], function: Callable[[], Any]) -> None:
        self._caches, self._function = caches, function
        self.results = tree_map(torch.clone, function())
        self._stores = self._addresses()

    def _addresses(self) -> list[int]:
        cache = self._caches[-1]
        return [store.data_ptr() for store in (*cache._keys, *cache._values)]

    def replay(self) -> None:
        """What CUDA would do."""
        assert self._addresses() == self._stores, "it would write elsewhere"
        for place, value in zip(tree_leaves(self.results), tree_leaves(self._function()), strict=True):
            place.copy_(value)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Make runners record (a CPU imitates it); the list gets the function and the rows of each replay."""
    found: list[tuple[str, int]] = []
    caches: list[KeyValueCache] = []
    begin, begin_cache, run = GraphRunner.__init__, KeyValueCache.__init__, GraphRunner.run

    def recording(self: GraphRunner, device: torch.device) -> None:
        begin(self, device)
        self.records = True

    def kept(self: KeyValueCache, *rest: Any) -> None:
        begin_cache(self, *rest)
        caches.append(self)

    def noted(self: GraphRunner, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        before = self.replays
        result = run(self, name, function, *inputs)
        if self.replays > before:
            found.append((name, len(inputs[0])))
        return result

    def recorded(function: Callable[[], Any], pool: Any) -> tuple[Replay, Any]:
        graph = Replay(caches, function)
        return graph, graph.results

    monkeypatch.setattr(GraphRunner, "__init__", recording)
    monkeypatch.setattr(GraphRunner, "run", noted)
    monkeypatch.setattr(KeyValueCache, "__init__", kept)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "_recorded", recorded)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return found


def plainly(make: Callable[..., TorchEngine], request: RolloutRequest = REQUEST, **settings: Any) -> Completions:
    """Every kernel launched by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunner, "_record", lambda *_: None)
        return make(**settings).rollout(request)


@pytest.mark.parametrize("layout", ["slots", "pages"])
@pytest.mark.parametrize(
    ("slots", "proxy"),
    [
        (5, Proxy()),
        pytest.param(16, Proxy("hidden_exact"), marks=pytest.mark.long),
        pytest.param(512, Proxy(), marks=pytest.mark.long),
        (512, Proxy("hidden_topk", 3)),
    ],
)
def test_responses_are_those_of_plain_forwards(
    slots: int,
    proxy: Proxy,
    layout: str,
    make: Callable[..., TorchEngine],
    replays: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Rows that are left and entered, columns that run out, and what is kept of several draws."""
    if layout == "pages":
        request.getfixturevalue("pages")
    asked = RolloutRequest(REQUEST.prompts, REQUEST.sampling, entropies=True, proxy=proxy)
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, 4)
    expected = plainly(make, asked, rollout_batch=slots)
    replays.clear()
    found = make(rollout_batch=slots).rollout(asked)
    for name in ("forward", "draw"):
        rows = [count for other, count in replays if other == name]
        assert len(set(rows)) > 1, "rows become fewer"
        assert set(rows) <= {1, 2, 3, 4, 6, 8, 12, 16, min(slots, 20)}
        assert len(rows) > 20
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.starts, expected.starts)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert found.entropies is not None
    np.testing.assert_allclose(found.entropies, expected.entropies, atol=1e-5, rtol=0)
    weights = np.eye(len(found.tokens))
    assert found.features is not None
    assert expected.features is not None
    np.testing.assert_allclose(found.features.weighted_sum(weights), expected.features.weighted_sum(weights), atol=2e-5)


@pytest.mark.usefixtures("pages")
def test_pages_need_one_recording_for_each_number_of_rows(
    make: Callable[..., TorchEngine], replays: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the responses become, and without copying their lengths for each token."""
    recordings = list[str]()
    record = GraphRunner._record
    monkeypatch.setattr(
        GraphRunner, "_record", lambda self, *rest: (recordings.append(rest[0].__name__), record(self, *rest))[1]
    )
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, 4)
    request = RolloutRequest(REQUEST.prompts[:1], Sampling(max_tokens=90, stop_ids=(), samples=3))
    make().rollout(request)
    assert sorted(recordings) == ["_draw", "_forward"]
    assert len(replays) > 150


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[int]]:
    """Let the first recordings fail with a message; the list gets one entry for each try."""

    def fail(message: str, times: int) -> list[int]:
        tries, recorded = list[int](), cuda_graphs._recorded

        def attempt(function: Callable[[], Any], pool: Any = None) -> Any:
            if pool is None:  # the small capture that follows a failed one
                return None, None
            tries.append(1)
            if len(tries) <= times:
                raise RuntimeError(message)
            return recorded(function, pool)

        monkeypatch.setattr(cuda_graphs, "_recorded", attempt)
        return tries

    return fail


@pytest.mark.usefixtures("replays")
def test_what_cannot_be_recorded_is_launched(
    make: Callable[..., TorchEngine], failing: Callable[[str, int], list[int]]
) -> None:
    """As the routing of some mixtures of experts, which waits for the GPU; the engine says why it is slower."""
    expected = plainly(make)
    tries, engine = failing("operation not permitted when stream is capturing\nmore", 100), make()
    found = engine.rollout(REQUEST)
    assert len(tries) == 1
    assert engine.slower_path is not None
    assert engine.slower_path.endswith("(operation not permitted when stream is capturing)")
    found_metrics = describe_process(engine)
    assert found_metrics["graph_share"] == 0
    assert found_metrics["graph_fault"] == engine.slower_path
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.usefixtures("pages")
def test_memory_that_runs_out_while_recording_is_made_free(
    make: Callable[..., TorchEngine], replays: list[tuple[str, int]], failing: Callable[[str, int], list[int]]
) -> None:
    """It is no reason to stop recording: the responses leave, and the next attempt has more room."""
    expected = plainly(make)
    replays.clear()
    tries, engine = failing("CUDA out of memory", 1), make()
    found = engine.rollout(REQUEST)
    assert len(tries) > 1
    assert len(replays) > 20
    assert engine.slower_path is None
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_metrics_say_how_many_steps_were_replayed(
    make: Callable[..., TorchEngine], replays: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all rollouts since the last step's metrics; nothing if there were none."""
    ran, run = list[int](), GraphRunner.run
    monkeypatch.setattr(GraphRunner, "run", lambda self, *rest: (ran.append(1), run(self, *rest))[1])
    engine = make()
    for _ in range(2):
        engine.rollout(REQUEST)
    found = describe_process(engine)
    assert 0 < found["graph_share"] < 1
    assert found["graph_share"] == len(replays) / len(ran)
    assert found["graph_fault"] is None
    assert "graph_share" not in describe_process(engine)


def test_one_process_without_graphs_shows_in_the_metrics_of_all() -> None:
    common = {"peak_memory": 1, "swapped": 0, "seconds_rollout": 1.0, "seconds_score": 1.0, "seconds_update": 1.0}
    ranks = [common | {"graph_share": 0.97, "graph_fault": None}, common | {"graph_share": 0.0, "graph_fault": "why"}]
    found = describe_ranks(ranks)
    assert (found["graph_share"], found["graph_fault"]) == (0.0, "why")
    assert "graph_share" not in describe_ranks([common, common])
