"""Training, evaluating and opening runs from Python; the commands call the same functions."""
