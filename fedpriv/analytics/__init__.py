"""Questions about the users, answered with user-level privacy and without training.

What a round of training is to a model, a survey is to questions: one cohort, one Gaussian sum query
over a vector group per question, one charge in the ledger before anything is released. No torch.
"""

from fedpriv.analytics.questions import (
    Answer,
    Distribution,
    Histogram,
    Mean,
    Quantiles,
    Question,
    Sum,
    Variance,
)
from fedpriv.analytics.survey import Answers, Survey, ask

__all__ = [
    "Answer",
    "Answers",
    "Distribution",
    "Histogram",
    "Mean",
    "Quantiles",
    "Question",
    "Sum",
    "Survey",
    "Variance",
    "ask",
]
