"""The privacy mechanism: layout, clipping, queries, noise and sampling.

Small enough to audit: together with `fedpriv.ledger` it is all that the guarantee rests on.
"""

from fedpriv.privacy.clipping import clip
from fedpriv.privacy.layout import Layout, VectorGroup, flat, joint, layers, per_layer
from fedpriv.privacy.mechanism import PoissonGaussianMechanism
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery
from fedpriv.privacy.round import Books, LocalTraining, PartialSum, RoundRequest, Transport
from fedpriv.privacy.sampling import PoissonSampling

__all__ = [
    "Books",
    "Entropy",
    "GaussianAverageQuery",
    "GaussianSumQuery",
    "Layout",
    "LocalTraining",
    "OperatingSystemEntropy",
    "PartialSum",
    "PoissonGaussianMechanism",
    "PoissonSampling",
    "RoundRequest",
    "SeededEntropy",
    "Transport",
    "VectorGroup",
    "clip",
    "flat",
    "joint",
    "layers",
    "per_layer",
]
