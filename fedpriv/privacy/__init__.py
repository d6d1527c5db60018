"""The privacy core: it draws cohorts, bounds contributions, adds noise and releases averages.

This is the first of two packages to audit; the other is `fedpriv.ledger`. Read in this order:

1. `layout` treats named tensors as one vector and defines the vector groups that are clipped
   together;
2. `clipping` turns a user's tensors into a contribution of whole numbers with an exact bound.
   `clipping_torch` does the same in batches and uses the kernels of `clipping_triton` on a GPU;
   only these two modules import torch. `outer_products` does it for sums of matrices;
3. `sampling` and `noise` draw the cohort and the noise exactly, from keys. `correlated_noise` draws
   noise that partly cancels over a series of rounds;
4. `gaussian_mechanism` defines the release of a round from its cohort's sum, the sensitivity, the
   noise and, together with the sampling policy, the event that is charged;
5. `round` manages the keys of a round or series, draws, collects, charges, adds noise and releases.
   All training and analytics use it.

An auditor must read or trust three things outside this package: a user's contribution does not
depend on other users (`fedpriv.engine`), a charge is durable (`fedpriv.ledger`), and events cost
what the accountant says (`fedpriv.accounting`). `docs/guarantee.md` walks through all of it.
"""
