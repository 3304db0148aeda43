"""delta: reinforcement learning with verifiable rewards and DelTA token credit."""

__version__ = "0.1.0"
