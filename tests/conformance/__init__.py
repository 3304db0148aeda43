"""Every backend through one suite, against one float64 oracle."""
