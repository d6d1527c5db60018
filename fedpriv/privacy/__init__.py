"""The privacy mechanism: layout, clipping, queries, noise and sampling.

Small enough to audit: together with `fedpriv.accounting` it is all that the guarantee rests on.
"""

from fedpriv.privacy.clipping import clip
from fedpriv.privacy.entropy import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.groups import VectorGroup, flat, joint, layers, per_layer
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.mechanism import PoissonGaussianMechanism
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery
from fedpriv.privacy.sampling import PoissonSampling

__all__ = [
    "Entropy",
    "GaussianAverageQuery",
    "GaussianSumQuery",
    "Layout",
    "OperatingSystemEntropy",
    "PoissonGaussianMechanism",
    "PoissonSampling",
    "SeededEntropy",
    "VectorGroup",
    "clip",
    "flat",
    "joint",
    "layers",
    "per_layer",
]
