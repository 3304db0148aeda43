"""Responses drawn by vLLM, over HTTP, from weights that a learner publishes."""

from backends.vllm.api import Launch
from backends.vllm.launcher import Launcher
from backends.vllm.sampler import TOLERANCES, VllmSampler, VllmSettings

__all__ = ["TOLERANCES", "Launch", "Launcher", "VllmSampler", "VllmSettings"]
