"""Measures of a model's outputs: users' metrics, and figures on held-out rows."""

from fedpriv.measures.metrics import metric, own_metrics

__all__ = ["metric", "own_metrics"]
