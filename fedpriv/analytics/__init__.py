"""Questions about the users, answered with user-level privacy and without training.

What a round of training is to a model, a survey is to questions: one cohort, one Gaussian sum query
over a vector group per question, one charge in the ledger before anything is released. No torch.
"""

from fedpriv.analytics.components import PrincipalComponents, SecondMoments
from fedpriv.analytics.questions import (
    Answer,
    Distribution,
    Histogram,
    Mean,
    Quantiles,
    Question,
    Sum,
    Variance,
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
    "Variance",
    "VectorQuestion",
    "ask",
]
