"""Responses drawn by vLLM, over HTTP, from weights that a learner publishes."""

from backends.vllm.api import LaunchOptions
from backends.vllm.launcher import ServerLauncher
from backends.vllm.sampler import TOLERANCES, VllmSampler, VllmSettings

__all__ = ["TOLERANCES", "LaunchOptions", "ServerLauncher", "VllmSampler", "VllmSettings"]
