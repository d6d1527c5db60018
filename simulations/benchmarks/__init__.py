"""Comparison of the engine with its rivals: the same work by each, in one run on one machine."""
