"""Responses drawn by vLLM, over HTTP, from weights that a learner publishes."""

from backends.vllm.command import ServedModel
from backends.vllm.launcher import ServerLauncher
from backends.vllm.sampler import VllmSampler

__all__ = ["ServedModel", "ServerLauncher", "VllmSampler"]
