"""Measuring a policy: benchmark suites, sampled accuracy with its uncertainty, and comparisons of two policies."""
