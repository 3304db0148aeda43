"""A run's model as others get it: quantised, as GGUF, on the hub, with a card."""
