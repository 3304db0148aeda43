"""The chunked head and the sampler, against whole logits in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.interface import Proxy, Sampling
from backends.torch import head as head_module
from backends.torch.head import TorchHead
from backends.torch.sampling import choose, truncate
from tests.backends.largest import Largest
from tests.device import DEVICE

TOKENS, SIZE, VOCAB = 13, 6, 29


@pytest.fixture
def case() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    coefficients = torch.randn(TOKENS, generator=generator)
    coefficients[[2, 5, 12]] = 0  # clipped tokens
    made = {
        "hidden": 2 * torch.randn(TOKENS, SIZE, generator=generator),
        "weight": torch.randn(VOCAB, SIZE, generator=generator),
        "targets": torch.randint(VOCAB, (TOKENS,), generator=generator),
        "coefficients": coefficients,
    }
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_statistics_and_gradients(
    case: dict[str, torch.Tensor], chunk: int, temperature: float, softcap: float | None, biased: bool
) -> None:
    """Everything the head says, and the gradient of Σ c·logp through it, is autograd's over whole logits."""
    hidden, weight = (case[name].double().requires_grad_() for name in ("hidden", "weight"))
    bias = torch.linspace(-2, 2, VOCAB, device=weight.device, requires_grad=True) if biased else None
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias.double()
    log = (capped(logits, softcap) / temperature).log_softmax(1)
    logprobs = log.gather(1, case["targets"][:, None])[:, 0]
    (logprobs * case["coefficients"]).sum().backward()

    own = None if bias is None else bias.detach().requires_grad_()
    head = TorchHead(case["weight"], chunk, softcap, own)
    found = head.statistics(case["hidden"], case["targets"], temperature, entropies=True, proxy=Proxy("hidden_exact"))
    gradient = torch.zeros_like(case["weight"])
    rest = case["targets"], found.logsumexp, case["coefficients"], temperature
    head.add_weight_gradient(gradient, case["hidden"], *rest)
    assert found.entropies is not None
    assert found.hidden_gradients is not None
    slopes = found.hidden_gradients * (case["coefficients"] / temperature)[:, None]
    close(found.logprobs, logprobs)
    close(found.entropies, -(log.exp() * log).sum(1))
    close(slopes, hidden.grad)
    close(gradient, weight.grad)
    if own is not None and bias is not None:
        close(own.grad, bias.grad)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("k", [1, 5, VOCAB + 3])
def test_truncated_direction(case: dict[str, torch.Tensor], k: int, softcap: float | None) -> None:
    """hidden_topk is autograd's d log q(y) / dh + the same for y outside the top k; k ≥ V is the exact proxy."""
    hidden, weight = case["hidden"].double().requires_grad_(), case["weight"].double()
    logits = capped(hidden @ weight.T, softcap)
    kept = logits.topk(min(k, VOCAB)).values
    chosen = logits.gather(1, case["targets"][:, None])[:, 0]
    (chosen - kept.logsumexp(1)).sum().backward()
    found = TorchHead(case["weight"], 4, softcap).statistics(
        case["hidden"], case["targets"], 1.0, entropies=False, proxy=Proxy("hidden_topk", k)
    )
    assert found.hidden_gradients is not None
    assert found.entropies is None
    close(found.hidden_gradients, hidden.grad)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("proxy", [Proxy("hidden_exact"), Proxy("hidden_topk", 5)], ids=lambda proxy: proxy.kind)
def test_directions_from_what_drawing_has_at_hand(
    case: dict[str, torch.Tensor], proxy: Proxy, softcap: float | None
) -> None:
    """They are those of scoring."""
    head, targets = TorchHead(case["weight"], 4, softcap), case["targets"]
    logits = head.logits(case["hidden"], 0.7) - 0.5
    found = head.gradients(case["hidden"], logits, logits.exp(), logits.exp().sum(1), targets, proxy)
    scored = head.statistics(case["hidden"], targets, 0.7, entropies=False, proxy=proxy)
    close(found, scored.hidden_gradients)


def test_logits_never_exist_whole(case: dict[str, torch.Tensor]) -> None:
    """No operation of a forward and backward makes a tensor larger than one chunk's logits or the head."""

    hidden = case["hidden"].repeat(20, 1)
    targets, coefficients = case["targets"].repeat(20), case["coefficients"].repeat(20)
    gradient = torch.zeros_like(case["weight"])
    with Largest() as largest:
        head = TorchHead(case["weight"], 7)
        found = head.statistics(hidden, targets, 0.9, entropies=True, proxy=Proxy("hidden_exact"))
        head.statistics(hidden, targets, 0.9, entropies=True, proxy=Proxy("hidden_topk", 5))
        head.add_weight_gradient(gradient, hidden, targets, found.logsumexp, coefficients, 0.9)
    assert VOCAB * 7 <= largest.numel <= max(VOCAB * 7, VOCAB * SIZE, hidden.numel())


def test_a_product_is_added_in_place_only_where_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor has no such kernel; one that forgets what is there, or rounds its result, is not used."""
    device = torch.device("cpu")
    assert not head_module.adds_in_place(device)

    def exact(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        total.addmm_(a.float(), b.float())

    def forgets(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        total.copy_(a.float() @ b.float())

    def rounds(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        total.add_((a.float() @ b.float()).bfloat16())

    for kernel, right in ((exact, True), (forgets, False), (rounds, False)):
        monkeypatch.setattr(head_module, "_add_product", kernel)
        head_module.adds_in_place.cache_clear()
        assert head_module.adds_in_place(device) is right
    head_module.adds_in_place.cache_clear()


def test_inverse_of_the_cumulative_distribution() -> None:
    """At the edges of the noise: never a token of probability zero, neither first, last nor in the middle."""
    weights = torch.tensor([0.0, 3.0, 0.0, 3.0, 0.0], device=DEVICE).repeat(4, 1)
    noise = torch.tensor([0.0, 0.49, 0.5, np.nextafter(1.0, 0.0)], dtype=torch.float64, device=DEVICE)
    assert choose(weights, noise, Sampling(1, ())).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("size", [3, 256, 257, 512, 513, 5000])
def test_choice_in_a_vocabulary_of_any_size(size: int) -> None:
    """That of one float64 sum over all tokens, half of which have no weight, within blocks and over their edges."""
    rng = np.random.default_rng(size)
    weights = (rng.exponential(size=(200, size)) * rng.integers(0, 2, size=(200, size))).astype(np.float32)
    weights[:, size // 2] = 1
    noise = np.concatenate([rng.random(150), np.zeros(25), np.full(25, np.nextafter(1.0, 0.0))])
    found = choose(*(torch.from_numpy(array).to(DEVICE) for array in (weights, noise)), Sampling(1, ())).cpu().numpy()
    chosen, below = weights[np.arange(200), found].astype(np.float64), np.arange(size) < found[:, None]
    before, total = (weights * below).sum(1, dtype=np.float64), weights.sum(1, dtype=np.float64)
    assert (chosen > 0).all()
    assert (before <= noise * total + 1e-6 * total).all()
    assert (noise * total <= before + chosen + 1e-6 * total).all()
    assert ((weights * below) > 0).sum(1)[150:175].max() == 0  # noise 0: the first that has weight
    assert ((weights[175:] > 0) & (np.arange(size) > found[175:, None])).sum() == 0  # next to 1: the last


def test_nucleus() -> None:
    """The likeliest tokens up to top_p, the one that crosses it included, of weights whatever their sum."""
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]], device=DEVICE)
    for top_p, kept in ((0.6, [0, 0.4, 0, 0.3]), (0.75, [0, 0.4, 0.2, 0.3])):
        found = truncate(probabilities, Sampling(1, (), top_p=top_p))
        close(found, torch.tensor([kept, [0.97, 0, 0, 0]]))
    noise = torch.tensor([0.999, 0.999], dtype=torch.float64, device=DEVICE)
    assert choose(5 * probabilities, noise, Sampling(1, (), top_p=0.6)).tolist() == [3, 0]


def close(found: torch.Tensor, expected: torch.Tensor | None) -> None:
    assert expected is not None
    np.testing.assert_allclose(found.detach().double().cpu(), expected.detach().double().cpu(), atol=5e-6, rtol=1e-6)
