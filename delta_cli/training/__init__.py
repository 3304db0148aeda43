"""The loop: rollouts, rewards, credit, updates, checkpoints, and the folder a run leaves behind."""
