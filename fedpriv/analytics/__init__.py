"""Questions about the users, answered with user-level privacy and without training.

A survey is one round: one cohort, one Gaussian sum query with a vector group for each question, and
one charge in the ledger before anything is released. This package does not import torch.
"""

from fedpriv.analytics.questions import (
    Answer,
    Distribution,
    Histogram,
    Mean,
    PrincipalComponents,
    Quantiles,
    Question,
    SecondMoments,
    Sum,
    VectorQuestion,
)
from fedpriv.analytics.survey import Answers, Survey, ask

__all__ = [
    "Answer",
    "Answers",
    "Distribution",
    "Histogram",
    "Mean",
    "PrincipalComponents",
    "Quantiles",
    "Question",
    "SecondMoments",
    "Sum",
    "Survey",
    "VectorQuestion",
    "ask",
]
