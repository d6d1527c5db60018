"""Experiments, studies and benchmarks."""

from fedpriv.processor import widen_openblas

widen_openblas()
