"""Publishing a run's model: quantised, as GGUF, on the hub, with a model card."""
