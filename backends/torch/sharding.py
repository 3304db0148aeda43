"""A policy on several ranks: the same on each of them, or with weights, gradients and moments split by FSDP2.

If the weights are split, a forward or backward pass gathers a layer's weights while it runs, which all ranks must do
at the same time. So they agree on the number of micro-batches, and a rank that has fewer computes a token that counts
for nothing.

Under "hybrid" the weights are split over the ranks of a machine, and each machine holds a copy (HSDP). FSDP then knows
the ranks of one copy alone, and gradients are summed over copies once an update, not in every micro-batch.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from backends.batching import PackedBatch, pack
from backends.collective import SOLO, any_of, most
from backends.interface import BackendError, Collective, Sequences
from backends.settings import Parallel
from backends.torch.collective import TorchCollective
from backends.torch.device import explained
from backends.torch.model import TorchPolicy, tensors_of

AnyBatch = TypeVar("AnyBatch")

SPLIT_ABOVE = 2 * 10**9  # trained weights above which "auto" splits them; each takes 16 bytes with gradient and moments

# One token that predicts nothing: what a rank computes if others still have micro-batches and it has none.
FILLER: PackedBatch = pack(Sequences((np.zeros(1, np.int64),), np.empty(0, np.int64), np.zeros(2, np.int64)), [[0]])


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split_modules(policy: TorchPolicy) -> list[Any]:
    """The modules of a policy that FSDP splits; none if the policy is whole. FSDP adds methods to them at run time."""
    return [module for module in policy.causal.modules() if isinstance(module, FSDPModule)]


def _trunk(causal: Any) -> Any:
    """A method of the model that calls its base model."""
    return MethodType(lambda self, **inputs: self.base_model(**inputs), causal)


def _precision(policy: TorchPolicy) -> MixedPrecisionPolicy:
    """How FSDP gathers and sums: trained bfloat16 weights as such, from shards that are their float32 masters."""
    rounded = any(weight.dtype == torch.bfloat16 for _, weight in policy.trained())
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if rounded else {}
    return MixedPrecisionPolicy(**half, cast_forward_inputs=False)


def _make_masters(module: nn.Module) -> None:
    """Make a module's trained bfloat16 weights float32 before they are split; gathering rounds them again."""
    for weight in module.parameters():
        if weight.requires_grad and weight.dtype == torch.bfloat16 and not isinstance(weight, DTensor):
            weight.data = weight.data.float()


def _keep_float32_gradients(causal: nn.Module) -> None:
    """Sum the gradients of bfloat16 weights over micro-batches in float32."""
    for weight in causal.parameters():
        if weight.requires_grad and weight.dtype == torch.bfloat16:
            weight.grad_dtype = torch.float32


def _hooks_of_others(module: Any, hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    """The hooks that FSDP did not register, such as the one that hands recurrent layers their layout."""
    state = module._get_fsdp_state()
    return OrderedDict((key, hook) for key, hook in hooks.items() if getattr(hook, "__self__", None) is not state)


@contextmanager
def _without_hooks(modules: list[Any]) -> Iterator[None]:
    """Forward passes of gathered modules run as if FSDP had not wrapped them; hooks that are not FSDP's stay.

    FSDP's hooks make its own streams wait for the present one, which a CUDA graph cannot record.
    """
    before = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
    wrapped = [(module, module.trunk) for module in modules if hasattr(module, "trunk")]
    for module in modules:
        module._forward_pre_hooks = _hooks_of_others(module, module._forward_pre_hooks)
        module._forward_hooks = _hooks_of_others(module, module._forward_hooks)
    for module, _ in wrapped:
        module.trunk = _trunk(module)
    try:
        yield
    finally:
        for module, pre, post in before:
            module._forward_pre_hooks, module._forward_hooks = pre, post
        for module, trunk in wrapped:
            module.trunk = trunk


class DataParallel:
    """How the ranks that train one policy share its weights, gradients and micro-batches."""

    def __init__(self, collective: Collective, settings: Parallel, device: torch.device) -> None:
        self.collective = collective
        self.shards = 1  # the ranks that hold one copy of the weights together; until ``decide`` has been called
        self._sharding, self._device = settings.sharding, device
        self._reshard = settings.sharding != "optimizer"
        self._mesh: DeviceMesh | None = None
        self._copies: Any = None  # the ranks that hold the same rows as this one, if there are several copies
        hybrid = settings.sharding == "hybrid"
        self._shard_size = shard_size(collective, settings.shard_size) if hybrid else collective.size

    @property
    def sharded(self) -> bool:
        """Whether the weights are split."""
        return self.shards > 1

    def splits(self, trained: int) -> bool:
        """Whether so many trained weights are split over the ranks."""
        split = trained > SPLIT_ABOVE if self._sharding == "auto" else self._sharding != "none"
        return split and self.collective.size > 1

    def decide(self, trained: int) -> None:
        """Decide whether so many trained weights are split."""
        if not self.splits(trained):
            return
        ranks, self.shards = self.collective.size, self._shard_size
        if self.shards == ranks:
            self._mesh = init_device_mesh(self._device.type, (ranks,))
            return
        assert isinstance(self.collective, TorchCollective)
        copies = np.arange(ranks).reshape(-1, self.shards)
        self._mesh = DeviceMesh.from_group(self.collective.subgroup(copies.tolist()), self._device.type)
        self._copies = self.collective.subgroup(copies.T.tolist())

    def place(self, policy: TorchPolicy) -> None:
        """Bring a policy to the device, whole or split over the ranks."""
        causal = policy.causal
        if not self.sharded:
            causal.to(self._device)
            _keep_float32_gradients(causal)
            return
        layers = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
        precision = _precision(policy)
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        for module in (*layers, causal):  # the model itself comes last; it holds embedding, norm and head
            if policy.loaded_on_first:
                self._fill(module, seen)
            _make_masters(module)
            reshards = self._reshards(module, policy)
            fully_shard(module, mesh=self._mesh, reshard_after_forward=reshards, mp_policy=precision)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # the gradient is a sum over tokens, not a mean over ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            module.set_reshard_after_backward(self._reshard, recurse=False)
        # The base model is called directly, which would skip the hooks that gather the weights of the model itself.
        causal.trunk = _trunk(causal)
        register_fsdp_forward_method(causal, "trunk")
        if precision.param_dtype is not None:  # so that the head's gradient can be summed in float32
            causal.unshard()
            _keep_float32_gradients(causal)
            causal.reshard()

    def _fill(self, module: nn.Module, seen: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Bring the tensors of a module to the device, on every rank with the first one's numbers.

        Skips what was split already, and what is in ``seen``, to which it adds the module's buffers.
        """
        collective = self.collective
        assert isinstance(collective, TorchCollective)
        known = dict(seen)  # with the tensors themselves, whose ids could be used again otherwise
        for holder, key, tensor in tensors_of(module):
            if isinstance(tensor, DTensor):
                continue
            if id(tensor) not in known:
                found = tensor.detach() if collective.rank == 0 else torch.empty_like(tensor, device=self._device)
                found = found.to(self._device).contiguous()
                collective.broadcast(found)
                if isinstance(tensor, nn.Parameter):
                    found = nn.Parameter(found, requires_grad=tensor.requires_grad)
                else:
                    seen |= {id(tensor): (tensor, found), id(found): (found, found)}
                known |= {id(tensor): (tensor, found)}
            holder[key] = known[id(tensor)][1]

    def _reshards(self, module: nn.Module, policy: TorchPolicy) -> bool:
        """Whether a module frees its gathered weights after a forward pass; the model keeps its own for the head."""
        return self._reshard and module is not policy.causal

    @contextmanager
    def gathered(self, policy: TorchPolicy) -> Iterator[None]:
        """Keep all weights of a policy whole on every rank, so that ranks may run different numbers of forwards."""
        modules = _split_modules(policy)
        try:
            self._gather(modules)
            with _without_hooks(modules):
                yield
        finally:
            for module in modules:
                module.set_reshard_after_forward(self._reshards(module, policy), recurse=False)
            self.scatter(policy)

    @staticmethod
    def _gather(modules: list[Any]) -> None:
        with explained(
            "while the whole model was gathered to draw with; lower update.feature_bytes, set update.offload = true, "
            'or draw with vLLM (engine.kind = "vllm")'
        ):
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()

    def scatter(self, policy: TorchPolicy) -> None:
        """Free the memory of gathered weights, which are stale once their shards have changed."""
        for module in _split_modules(policy):
            module.reshard()

    def rounds(self, batches: Iterable[AnyBatch]) -> Iterator[AnyBatch | None]:
        """The micro-batches of this rank; None while other ranks still have some, and all must keep step."""
        if not self.sharded:
            yield from batches
            return
        mine = list(batches)
        count = most(self.collective, len(mine))  # before the first forward pass, which all ranks enter together
        yield from mine
        yield from [None] * (count - len(mine))

    def anywhere(self, here: bool) -> bool:
        """Whether something holds on any rank that keeps step with this one; False if weights are not split."""
        return self.sharded and any_of(self.collective, here)

    def sum_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Sum gradients over the copies of the weights, in place; over one copy's ranks they were while computed."""
        if self.collective.size > self.shards:
            assert isinstance(self.collective, TorchCollective)  # what backends.torch.join gives
            self.collective.sum_tensors(gradients, self._copies)

    def norm(self, gradients: Iterable[Tensor]) -> float:
        """The norm of the whole gradient, from the part that this rank holds; the same on every rank."""
        found = float(nn.utils.get_total_norm(list(gradients)))
        if not self.sharded:
            return found
        copies = self.collective.size // self.shards
        return float(np.sqrt(self.collective.sum(np.array([found**2]))[0] / copies))

    def first_row(self, weight: Tensor) -> int:
        """The number, in the whole weight, of the first row that this rank holds."""
        if not isinstance(weight, DTensor):
            return 0
        rows = int(weight.shape[0])
        return min(rows, self.collective.rank % self.shards * -(-rows // self.shards))  # as torch.chunk splits them


def shard_size(collective: Collective, asked: int) -> int:
    """How many ranks hold one copy of hybrid weights: as many as ``asked``; 0: those of a machine if it has several.

    All of them if machines have different numbers. Raises BackendError if not every copy could have as many.
    """
    ranks = collective.size
    if asked == 0:
        [here, *others] = collective.gather(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return here if here > 1 and {*others} == {here} and ranks % here == 0 else ranks
    if ranks % asked:
        raise BackendError(
            f"parallel.shard_size = {asked}: {ranks} processes cannot form sets of {asked}; set it to a divisor of "
            f"{ranks}, or to 0"
        )
    return asked


ALONE = DataParallel(SOLO, Parallel(), torch.device("cpu"))  # a single process
