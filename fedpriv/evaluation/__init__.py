"""Evaluation of a model: on held-out rows, on users' own data, and personalised for its users."""
