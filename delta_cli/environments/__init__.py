"""What answers between two turns of an episode: tools in a chat, and environments that write into a running text."""

from delta_cli.environments.turn import Turn

__all__ = ["Turn"]
