"""The engine beside its rivals: the same work by each, in one run on one machine."""
