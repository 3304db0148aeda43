"""AdamW's moments in float32 or 8 bits, on the device or beside it, against torch's own AdamW."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from backends.interface import BackendError
from backends.settings import Optimizer
from backends.torch import moments as moments_module
from backends.torch.moments import AdamState, Piece, layout
from backends.torch.optimizer import TorchAdamW
from backends.torch.quantised import BLOCK, codes_of_first, codes_of_root, dequantise, quantise
from backends.torch.sharding import ALONE
from tests.device import DEVICE

CPU = torch.device("cpu")
# Longer than a block, than a bucket below and than what keeps float32 moments; not multiples of any; tiny.
SHAPES = {"long": (97, 83), "norm": (7,), "wide": (3, 5001), "square": (64, 64), "number": ()}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2048 numbers, so that the weights above take several and cross from one to the next."""
    monkeypatch.setattr(moments_module, "BUCKET", 2048)


def make(seed: int = 0, **settings: object) -> TorchAdamW:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for name, shape in SHAPES.items()}
    return TorchAdamW(weights, Optimizer(**settings), ALONE)  # type: ignore[arg-type]


def gradients(step: int) -> dict[str, Tensor]:
    """Far smaller from the fourth step on, so that scales that ought to fall are seen to."""
    generator, size = torch.Generator().manual_seed(100 + step), 1e-3 if step < 3 else 1e-7
    return {name: size * torch.randn(shape, generator=generator).to(DEVICE) for name, shape in SHAPES.items()}


def run(optimizer: TorchAdamW, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            optimizer.weights[name].grad = gradient
        optimizer.step(1e-2 / (1 + step), scale=1.0)


def assert_equal(one: TorchAdamW, other: TorchAdamW) -> None:
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


def files(optimizer: TorchAdamW, folder: Path) -> list[bytes]:
    """What the optimizer writes into a new folder."""
    folder.mkdir()
    digests = optimizer.save(folder)
    written = {f"{name}.safetensors": (folder / f"{name}.safetensors").read_bytes() for name in ("weights", "moments")}
    assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}
    return list(written.values())


# ------------------------------------------------------------------------------ layout and arithmetic


def test_pieces_cover_every_weight_once() -> None:
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    buckets = layout(sizes)
    assert len(buckets) == -(-sum(-(-size // 256) * 256 for size in sizes.values()) // 2048)
    for name, size in sizes.items():
        mine = [piece for pieces in buckets for piece in pieces if piece.name == name]
        assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine[:-1])]
        assert mine[-1].stop == size
    for pieces in buckets:
        assert all(piece.start % 256 == piece.at % 256 == 0 for piece in pieces)
        assert all(a.inside.stop <= b.inside.start for a, b in itertools.pairwise(pieces))
        assert pieces[-1].inside.stop <= 2048
    assert layout({"a": 3000, "b": 10})[1] == [Piece("a", 2048, 3000, 0), Piece("b", 0, 10, 1024)]


@pytest.mark.parametrize("offload", [False, True])
def test_bit_for_bit_torch_adamw(offload: bool) -> None:
    """The pieces and the way to host memory and back change nothing."""
    optimizer = make(offload=offload, max_grad_norm=0.0)
    weights = [nn.Parameter(weight.detach().clone()) for weight in optimizer.weights.values()]
    adamw = torch.optim.AdamW(weights, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(5):
        for weight, gradient in zip(weights, gradients(step).values(), strict=True):
            weight.grad = gradient
        adamw.param_groups[0]["lr"] = 1e-2 / (1 + step)
        adamw.step()
    run(optimizer, range(5))
    for expected, weight in zip(weights, optimizer.weights.values(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_offload_changes_no_bit(moments: str, tmp_path: Path) -> None:
    """Neither of the weights nor of the files, and either goes on from the other's."""
    here, there = make(moments=moments), make(moments=moments, offload=True)
    for optimizer in (here, there):
        run(optimizer, range(3))
    assert files(here, tmp_path / "here") == files(there, tmp_path / "there")
    crossed = make(seed=1, moments=moments), make(seed=1, moments=moments, offload=True)
    for optimizer, folder in zip(crossed, ("there", "here"), strict=True):
        optimizer.load(tmp_path / folder)
    for optimizer in (here, there, *crossed):
        run(optimizer, range(3, 6))
        assert_equal(optimizer, here)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_a_processor_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's context looks for an accelerator, and fails where that is Apple's."""
    monkeypatch.setattr(torch.cuda, "stream", None)
    run(make(offload=True), range(1))


def test_before_the_first_step_there_are_no_moments(tmp_path: Path) -> None:
    """Who only draws pays nothing for them, and what was loaded from such a file starts from zero again."""
    fresh, used = make(), make()
    fresh.save(tmp_path)
    assert "state" not in vars(fresh)
    run(used, range(2))
    used.load(tmp_path)
    for optimizer in (fresh, used):
        run(optimizer, range(2))
    assert_equal(fresh, used)


# ------------------------------------------------------------------------------------------- files


def test_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    optimizer = make(moments="int8")
    run(optimizer, range(2))
    optimizer.save(tmp_path)
    weights, moments = (load_file(tmp_path / f"{name}.safetensors") for name in ("weights", "moments"))
    for name, weight in optimizer.weights.items():
        assert torch.equal(weights[name], weight.cpu())
    assert moments.pop("step") == 2
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in moments.items()}
    assert shapes == {
        f"{moment}.{name}": found
        for moment in ("exp_avg", "exp_avg_sq")
        for name, found in {
            "long.codes": ((97, 83), torch.uint8),
            "long.scales": ((32,), torch.float32),  # 8051 numbers in blocks of 256
            "wide.codes": ((3, 5001), torch.uint8),
            "wide.scales": ((59,), torch.float32),
            "square.codes": ((64, 64), torch.uint8),
            "square.scales": ((16,), torch.float32),
            "norm": ((7,), torch.float32),
            "number": ((), torch.float32),
        }.items()
    }


def test_files_that_safetensors_wrote_are_read(tmp_path: Path) -> None:
    """With the state of torch's own optimizer in them."""
    optimizer = make(max_grad_norm=0.0, epsilon=1e-8, weight_decay=0.1)
    weights = {name: nn.Parameter(weight.detach().clone()) for name, weight in optimizer.weights.items()}
    adamw = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(4):
        for name, weight in weights.items():
            weight.grad = gradients(step)[name]
        adamw.param_groups[0]["lr"] = 1e-2 / (1 + step)
        adamw.step()
        if step == 1:
            state = {f"{k}.{n}": adamw.state[w][k] for n, w in weights.items() for k in ("exp_avg", "exp_avg_sq")}
            save_file({name: weight.detach() for name, weight in weights.items()}, tmp_path / "weights.safetensors")
            save_file({**state, "step": torch.tensor(2.0)}, tmp_path / "moments.safetensors")
    optimizer.load(tmp_path)
    run(optimizer, range(2, 4))
    for name, weight in weights.items():
        assert torch.equal(optimizer.weights[name], weight), name


@pytest.mark.parametrize(("written", "read"), [("float32", "int8"), ("int8", "float32")])
def test_moments_of_another_type_are_refused(written: str, read: str, tmp_path: Path) -> None:
    optimizer, other = make(moments=written), make(moments=read)
    run(optimizer, range(1))
    optimizer.save(tmp_path)
    with pytest.raises(BackendError, match=f'moments in {written}.*resume with update.moments = "{written}"') as caught:
        other.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert_equal(other, make())


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*shape: object, **options: object) -> Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(BackendError, match=r"27,158 weights .* host's memory; set update.moments"):
        _ = make(offload=True).state
    with pytest.raises(BackendError, match=r"device's memory; set update.offload = true"):
        _ = make().state


# ------------------------------------------------------------------------------------------ 8 bits


def meanings_by_hand(signed: bool) -> np.ndarray:
    """The 256 numbers in exact fractions: in the decade that ends at 10^-k, the middles of 2^(6−k) or 2^(7−k) steps."""
    found = [Fraction(1)]
    for k in range(7):
        steps = 2 ** ((6 if signed else 7) - k)
        middles = [(Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * i + 1, 2 * steps)) / 10**k for i in range(steps)]
        found += middles + [-middle for middle in middles if signed]
    found.append(Fraction(0) if signed else Fraction(1, 10**7))
    return np.array(sorted(map(float, found)))


@pytest.mark.parametrize("signed", [True, False])
def test_meanings_of_the_codes(signed: bool) -> None:
    found = (codes_of_first if signed else codes_of_root)(CPU).numpy()
    expected = meanings_by_hand(signed)
    assert len(expected) == 256
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_every_number_gets_the_nearest_code(signed: bool, spread: float) -> None:
    """Against a search through all codes in float64, and within the bound that the steps of a decade give."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(16 * BLOCK) * np.exp(spread * rng.standard_normal(16 * BLOCK))).astype(np.float32)
    values[:BLOCK] = 0
    if not signed:
        values = np.abs(values)
    meanings = (codes_of_first if signed else codes_of_root)(CPU)
    codes, scales = quantise(torch.from_numpy(values), meanings)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float32)
    found = dequantise(codes, scales, meanings).numpy().reshape(-1, BLOCK).astype(np.float64)
    blocks = values.reshape(-1, BLOCK).astype(np.float64)
    largest = np.abs(blocks).max(1)
    np.testing.assert_array_equal(scales.numpy(), largest.astype(np.float32))
    assert not found[0].any()

    error = np.abs(found - blocks)[1:] / largest[1:, None]
    shares = blocks[1:] / largest[1:, None]
    nearest = np.abs(shares[..., None] - meanings_by_hand(signed)).min(-1)
    np.testing.assert_allclose(error, nearest, atol=2e-7)
    # Half a step of the share's decade (0.9 · 10^-k / 2^(6−k) or 2^(7−k)), where −1 has no code of its own a whole one.
    k = np.clip(np.floor(-np.log10(np.maximum(np.abs(shares), 1e-12))), 0, 6)
    step = 0.9 * 10**-k / 2 ** ((6 if signed else 7) - k)
    assert (error <= step * np.where(shares < -0.98, 1, 0.5) * 1.001 + np.where(k == 6, 3e-7, 0) + 1e-7).all()


def test_the_first_step_is_that_of_float32() -> None:
    """Moments are rounded when they are stored, after the update has used them."""
    exact, rounded = make(), make(moments="int8")
    for optimizer in (exact, rounded):
        run(optimizer, range(1))
    assert_equal(exact, rounded)


def spread_gradients(spread: float) -> Iterator[Tensor]:
    """Gaussian gradients [64, 64] of 60 steps, of sizes that differ within a block by exp(spread · N(0, 1))."""
    sizes = 1e-4 * torch.exp(spread * torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))
    for step in range(60):
        yield sizes * torch.randn(64, 64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("spread", "near"), [(0.5, 0.1), (2.0, 0.3), (4.0, 0.9)])
def test_updates_stay_near_those_of_float32(spread: float, near: float) -> None:
    """Also where gradients in one block span many decades; float32's are at most about 1, in learning rates."""
    pair = [
        TorchAdamW({"w": nn.Parameter(torch.zeros(64, 64))}, Optimizer(weight_decay=0.0, moments=moments), ALONE)
        for moments in ("float32", "int8")
    ]
    for gradient in spread_gradients(spread):
        updates = []
        for optimizer in pair:
            weight = optimizer.weights["w"]
            before, weight.grad = weight.detach().clone(), gradient.clone()
            optimizer.step(1.0, 1.0)
            updates.append(weight.detach() - before)
        exact, found = updates
        assert found.abs().max() < (1.7 if spread < 4 else 3)
        assert (found - exact).norm() < near * exact.norm()


def test_why_the_second_moment_is_stored_as_its_root() -> None:
    """As it is, with a code for 0, it vanishes beside a first moment that does not."""
    meanings = torch.cat([torch.zeros(1), codes_of_root(CPU)[1:]])
    first, second, largest = torch.zeros(4096), torch.zeros(4096), 0.0
    for step, gradient in enumerate(spread_gradients(2.0), start=1):
        first = 0.9 * first + 0.1 * gradient.view(-1)
        second = 0.999 * second + 0.001 * gradient.view(-1).square()
        update = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        largest = max(largest, float(update.abs().max()))
        first = dequantise(*quantise(first, codes_of_first(CPU)), codes_of_first(CPU))
        second = dequantise(*quantise(second, meanings), meanings)
    assert largest > 100


@pytest.mark.long
def test_least_squares_reaches_the_same_loss() -> None:
    """Inputs of many sizes, noise in the targets; the loss without that noise is 0 at the solution."""
    sizes = torch.logspace(0, -1, 128)
    losses = {}
    for moments in ("float32", "int8"):
        generator = torch.Generator().manual_seed(0)
        solution = torch.randn(128, 64, generator=generator)
        weight = nn.Parameter(torch.zeros(128, 64))
        optimizer = TorchAdamW({"w": weight}, Optimizer(weight_decay=0.0, moments=moments, max_grad_norm=0.0), ALONE)
        for step in range(400):
            inputs, noise = torch.randn(32, 128, generator=generator) * sizes, torch.randn(32, 64, generator=generator)
            (inputs @ (weight - solution) + noise).square().mean().backward()
            optimizer.step(0.05 * (1 - step / 400), 1.0)
        losses[moments] = float(((weight.detach() - solution) * sizes[:, None]).square().sum(0).mean())
    assert losses["float32"] < 0.02 * float(sizes.square().sum()), "of the loss at the start"
    assert losses["int8"] == pytest.approx(losses["float32"], rel=0.05)


def test_bytes_by_hand() -> None:
    """Two codes a number and two scales a block, in whole blocks; 8 bytes a number where they are few."""
    weights = {"large": torch.zeros(100, 100), "small": torch.zeros(4095)}
    assert AdamState(weights, Optimizer()).bytes == 8 * (40 * 256 + 16 * 256)
    assert AdamState(weights, Optimizer(moments="int8")).bytes == 40 * (2 * 256 + 2 * 4) + 8 * 16 * 256
