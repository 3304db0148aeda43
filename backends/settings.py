"""The knobs of a backend. A recipe has the same sections, so that each key is declared once, here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sharding = Literal["auto", "none", "optimizer", "full", "hybrid"]

ROLLOUT_BATCH = 512  # responses that a local engine generates at a time, by default


def key(default: Any, description: str, unit: str = "", **limits: Any) -> Any:
    """A field with its meaning, unit and range."""
    return Field(default, description=description, json_schema_extra={"unit": unit} if unit else None, **limits)


class Section(BaseModel):
    """A table of a recipe: frozen, and closed to keys that it does not name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def but(self, **values: Any) -> Self:
        """A copy with these values, which are not checked."""
        return self.model_copy(update=values)


class Lora(Section):
    """Train low-rank adapters instead of the whole model."""

    # The adapted weight is W + scale · B·A. With DoRA each row of that sum has a trained length m, which starts as
    # the row's length in W: m · row / ‖row‖, without a gradient through the norm (arXiv 2402.09353, section 4.3).
    rank: int = key(16, "rank of the adapters", ge=1, le=1024)
    scale: float = key(2.0, "factor on the adapters' product (alpha / rank)", gt=0, le=1024)
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "names of the projections that get adapters",
        min_length=1,
        strict=False,
    )
    layers: int | None = key(None, "how many layers get adapters, counted from the last; absent: all", ge=1)
    dora: bool = key(False, "train the length of each row of a weight apart from its direction (DoRA)")


class RewardModelSettings(Section):
    """A sequence classifier that scores chats, and how it is run."""

    path: str = key(
        "", "folder of the reward model, or its name on the hub; a sequence classifier of transformers", min_length=1
    )
    label: str | None = key(None, "label whose logit is the score; absent: the only one")
    batch_size: int = key(8, "responses to one prompt that are scored at a time", "responses", ge=1, le=4096)
    max_length: int | None = key(
        None, "longest chat that it scores; a longer one has no verdict; absent: the model's own limit", "tokens", ge=1
    )
    device: str = key("auto", "PyTorch device, e.g. cuda:1; auto: this rank's GPU, or cpu without one", min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "type of its weights; auto: bfloat16 on a GPU, float32 on a processor"
    )


class Model(Section):
    """The policy that is trained."""

    path: str = key("tiny-base", 'model folder, name on the Hugging Face hub, or "tiny-base" (shipped)', min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "float32",
        "type of weights and compute; AdamW has float32 masters of bfloat16 weights; float16: adapters, mlx, on an M1",
    )
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    lora: Lora | None = key(None, "train low-rank adapters; absent: the whole model")
    adapter: str | None = key(None, "adapters of PEFT or mlx-lm to start from: a folder or hub name", min_length=1)
    load_in_4bit: bool = key(False, "quantise the base to 4 bits as it is loaded; needs [model.lora]")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lora is None and (name := "adapter" if self.adapter else "load_in_4bit" if self.load_in_4bit else ""):
            raise ValueError(f"model.{name} is for runs that train adapters; add [model.lora], or remove it")
        return self

    @property
    def published_adapters(self) -> Lora | None:
        """The adapters that a sampling engine gets alone; None if it gets the whole model, as vLLM does under DoRA."""
        return None if self.lora is None or self.lora.dora else self.lora


class Optimizer(Section):
    """AdamW with decoupled weight decay and bias-corrected moments.

    A backend refuses what it cannot do: int8 moments, or offloading where device and host share one memory.
    """

    beta1: float = key(0.9, "AdamW: decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.999, "AdamW: decay of the second moment", ge=0, lt=1)
    epsilon: float = key(1e-8, "AdamW: added to the denominator", gt=0, le=1)
    weight_decay: float = key(0.1, "AdamW: decoupled weight decay", ge=0, le=10)
    max_grad_norm: float = key(1.0, "the gradient's norm is clipped to it; 0: never", ge=0)
    moments: Literal["float32", "int8"] = key("float32", "AdamW: how moments are stored; int8 (PyTorch) is a quarter")
    offload: bool = key(False, "AdamW: moments and masters rest in host memory between updates, not on the GPU")


class MemoryBudget(Section):
    """How much a backend holds at a time. They change the memory and time of a run, not its results."""

    micro_batch_tokens: int = key(16384, "tokens of one forward and backward, padding included", "tokens", ge=1)
    head_chunk_tokens: int = key(512, "tokens whose logits exist at a time", "tokens", ge=1)
    feature_bytes: int = key(2**33, "token features kept on the device", "bytes", ge=0)
    feature_host_bytes: int = key(2**36, "token features kept on the host, the rest is computed anew", "bytes", ge=0)


class Parallel(Section):
    """How several processes train one model together; their number changes no result."""

    processes: int = key(1, "processes that delta train starts on this machine", "processes", ge=1, le=1024)
    sharding: Sharding = key(
        "auto",
        "what is split over processes. none: nothing; optimizer: gradients and moments; full: the weights as well; "
        "hybrid: as full over the processes of a machine, and each machine holds a copy (HSDP); "
        "auto: none below 2 billion trained weights, else full",
    )
    shard_size: int = key(
        0,
        "hybrid: processes that hold one copy of the weights together, a divisor of their number; 0: those of a "
        "machine, or all if each machine has one",
        "processes",
        ge=0,
        le=1024,
    )
    prompt_queue: bool = key(
        False,
        "each process takes the next prompt when it has room, so that none waits for the others' long responses; else "
        "each has a fixed share. The responses are the same, but numbers may differ by rounding from run to run",
    )
    timeout: float = key(
        1800.0, "the run ends after a rank that others wait for has shown no progress for so long", "seconds", gt=0
    )
    rollout_timeout: float = key(
        14400.0, "the same while a rank that still answers draws, grades or evaluates", "seconds", gt=0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shard_size and self.sharding != "hybrid":
            raise ValueError(
                f'shard_size = {self.shard_size} has no effect; set parallel.sharding = "hybrid", or '
                "parallel.shard_size = 0"
            )
        if self.shard_size == 1:
            raise ValueError('shard_size = 1 splits nothing; set parallel.sharding = "none", or a larger shard_size')
        return self


class EngineSection(Section):
    """The sampler of the responses: the trainer's own backend, or vLLM servers that load the new weights."""

    kind: Literal["local", "vllm"] = key("local", "local: the trainer's backend; vllm: vLLM servers, see docs/vllm.md")
    url: tuple[str, ...] = key((), "vllm: addresses of running servers, which requests are spread over", strict=False)
    launch: bool = key(False, "vllm: start a server on this machine, and end it with the run")
    python: str | None = key(None, "launch: Python of the environment that has vLLM; absent: this one")
    arguments: tuple[str, ...] = key((), "launch: further options for vLLM's command line", strict=False)
    memory: float | None = key(
        None,
        "launch: share of the GPU's memory the server may take; absent: vLLM's default, on a CPU half of what is free",
        gt=0,
        lt=1,
    )
    colocated: bool = key(False, "vllm: the server shares the trainer's GPU and frees it while the trainer works")
    async_steps: int = key(
        0, "vllm: batches sampled ahead, while the trainer updates on an earlier one", "batches", ge=0, le=16
    )
    concurrency: int = key(256, "vllm: requests to each server at a time", "requests", ge=1, le=4096)
    deadline: float = key(1800.0, "vllm: longest wait for one response", "seconds", gt=0)
    stall: float = key(
        60.0,
        "vllm: a server that makes no token for so long while it has requests is left; other servers take its requests",
        "seconds",
        gt=0,
    )
    tolerance: float | None = key(
        None,
        "vllm: largest mean difference to the trainer's log-probabilities after new weights; absent: 0.001, with "
        "bfloat16 0.15",
        "nats",
        gt=0,
    )
    inbox: str | None = key(
        None, "vllm: folder for new weights; absent: in memory if there is room, otherwise in the run folder"
    )

    transfer: Literal["folder", "nccl"] = key(
        "folder",
        "vllm: how new weights reach servers; folder: they read engine.inbox; nccl: over the network, sent by "
        "a process of engine.python",
    )

    in_flight: bool = key(
        False,
        "vllm: servers load new weights while they draw responses, which may then span versions; needs async_steps",
    )

    @property
    def takes_adapters(self) -> bool:
        """Whether servers can be given adapters alone."""
        return self.transfer == "folder" and not self.in_flight

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "local":
            fields = type(self).model_fields
            changed = {name for name in self.model_fields_set - {"kind"} if getattr(self, name) != fields[name].default}
            if changed:
                raise ValueError(f'engine.{min(changed)} applies to vLLM; set engine.kind = "vllm", or remove it')
        elif self.launch == bool(self.url):
            raise ValueError('engine.kind = "vllm" needs either engine.url of running servers or engine.launch = true')
        if self.transfer == "nccl" and (self.launch or self.colocated or self.python is None):
            raise ValueError(
                'engine.transfer = "nccl" is for servers on other GPUs, named in engine.url, and needs vLLM on this '
                "machine, too: name its Python in engine.python, and leave out engine.launch and engine.colocated"
            )
        if self.async_steps and self.colocated:
            raise ValueError(
                "engine.async_steps samples while the trainer works, so they cannot share a GPU; set "
                "engine.colocated = false or engine.async_steps = 0"
            )
        if self.in_flight and not self.async_steps:
            raise ValueError(
                "engine.in_flight changes weights while batches are drawn ahead; set engine.async_steps to 1 or more"
            )
        return self


@dataclass(frozen=True)
class BackendSettings:
    """Everything that a backend needs to know before it loads a model: whole sections, and a few values more."""

    model: Model  # its path is a folder or a hub name
    optimizer: Optimizer = field(default_factory=Optimizer)
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    parallel: Parallel = field(default_factory=Parallel)
    rollout_batch: int = ROLLOUT_BATCH
    seed: int = 0  # for what is initialised at random (adapters)
    threads: int | None = None  # of the processor; None: the backend's choice
    deterministic: bool = False  # on CUDA: only kernels that give the same bits every time
    keep_reference: bool = False  # hold what Learner.reference() needs
    frozen: bool = False  # draw and score only: quantised weights then need no adapters
    publish_adapters: bool = True  # trained adapters are published alone; otherwise merged into the model

    @classmethod
    def of(cls, path: str, **values: Any) -> BackendSettings:
        """Settings for the model at ``path`` from keys without their sections; the other keys have their defaults.

        ``of(path, dtype="bfloat16", micro_batch_tokens=512, keep_reference=True)``. Raises pydantic's
        ValidationError for a value out of range, TypeError for a name that is no key.
        """
        model = Model(path=path, **_taken(values, Model))
        optimizer = values.pop("optimizer", None) or Optimizer(**_taken(values, Optimizer))
        memory = MemoryBudget(**_taken(values, MemoryBudget))
        return cls(model, optimizer, memory, Parallel(**_taken(values, Parallel)), **values)


def _taken(values: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """Take the section's keys out of ``values``."""
    return {name: values.pop(name) for name in section.model_fields if name in values}
