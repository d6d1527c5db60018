"""Experiments, studies and benchmarks."""
