"""Measures of a model's outputs: users' metrics, and figures on held-out rows."""
