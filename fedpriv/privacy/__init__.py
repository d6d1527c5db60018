"""What one round may do with users' data: who is drawn, what each may add, what noise goes out.

This is the first of the two folders to audit; the other is the ledger. Read in this order:

1. `layout`: named tensors as one vector, and the vector groups that are clipped together;
2. `clipping`: what one user adds, in whole numbers, within an exact bound; `clipping_torch` does
   the same in batches, on a GPU by the kernels of `clipping_triton`; only these two import torch.
   `outer_products` does it for sums of matrices;
3. `sampling` and `noise`: the cohort and the noise, drawn exactly, from keys; `correlated_noise`:
   noise that cancels in part over a series of rounds; `draws`: the keys of a round or series;
4. `gaussian_mechanism`: what is released of a cohort's sum, how far one user moves it, how it is
   noised, and, with the sampling policy, the event that it is charged as;
5. `round`: draw, collect, charge, noise, release. All of training and analytics passes through it.

What is not here and must be trusted or read as well: that a user's contribution does not depend on
other users (`fedpriv.engine`, tested there), that a charge is durable (the ledger), and that events
cost what the accountant says (`fedpriv.accounting`). `docs/guarantee.md` walks through all of it.
"""

from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, GaussianQuery
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import PrivacyRecords, private_round
from fedpriv.privacy.sampling import ExampleSampling, PoissonSampling

__all__ = [
    "ExampleSampling",
    "GaussianMechanism",
    "GaussianQuery",
    "OperatingSystemEntropy",
    "PoissonSampling",
    "PrivacyRecords",
    "SeededEntropy",
    "private_round",
]
