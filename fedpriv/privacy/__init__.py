"""What one round may do with users' data: who is drawn, what each may add, what noise goes out.

This is the first of the two folders to audit; the other is the ledger. Read in this order:

1. `layout`: named tensors as one vector, and the vector groups that are clipped together;
2. `clipping`: what one user adds, in whole numbers, within an exact bound; `clipping_torch` does
   the same in batches and is the only module here that imports torch;
3. `sampling` and `noise`: the cohort and the noise, drawn exactly, from keys;
4. `query`: what is released of a cohort's sum, how far one user moves it, and how it is noised;
5. `mechanism`: sampling and query as one object, with the event that they are charged as;
6. `round`: draw, collect, charge, noise, release. All of training and analytics passes through it.

What is not here and must be trusted or read as well: that a user's contribution does not depend on
other users (`fedpriv.engine`, tested there), that a charge is durable (the ledger), and that events
cost what the accountant says (`fedpriv.accounting`). `docs/guarantee.md` walks through all of it.
"""

from fedpriv.privacy.clipping import Clipping, clip
from fedpriv.privacy.gaussian_mechanism import AdaptiveClipping, Metric, PoissonGaussianMechanism
from fedpriv.privacy.layout import Layout, VectorGroup, flat, joint, layers, per_layer
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.query import Averaging, GaussianQuery
from fedpriv.privacy.round import (
    LocalTraining,
    PartialSum,
    PrivacyRecords,
    RoundRequest,
    Transport,
    private_round,
)
from fedpriv.privacy.sampling import PoissonSampling

__all__ = [
    "AdaptiveClipping",
    "Averaging",
    "Clipping",
    "Entropy",
    "GaussianQuery",
    "Layout",
    "LocalTraining",
    "Metric",
    "OperatingSystemEntropy",
    "PartialSum",
    "PoissonGaussianMechanism",
    "PoissonSampling",
    "PrivacyRecords",
    "RoundRequest",
    "SeededEntropy",
    "Transport",
    "VectorGroup",
    "clip",
    "flat",
    "joint",
    "layers",
    "per_layer",
    "private_round",
]
