"""Sums over nodes with a server that need not be trusted: cancelling masks, and noise shares.

A node adds its share of the noise to the sum of its users' contributions and masks the result.
The server adds the uploads of all nodes and learns their noised total and nothing else, even if it
deviates from the protocol together with up to t nodes. Read in this order:

1. `parameters` has the graph of nodes that mask each other, the noise of a share, and δ′, the loss
   in privacy of the total of the shares compared with one Gaussian;
2. `protocol` has the messages of a round as pure functions of values, without network or files;
3. `simulation` runs all nodes of a round in one process.

The protocol is that of Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving
machine learning", on a sparse graph as in Bell et al. 2020, "Secure single-server aggregation with
(poly)logarithmic overhead". `docs/secure-sums.md` states the guarantee, and proves it.

The package relies on two promises of its callers. A node sends one sum and signs one pair of lists
per attempt, and uses a key pair once; and its consent pins the names and certificates of all nodes.
"""
