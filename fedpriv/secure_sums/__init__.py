"""Sums over nodes whose server need not be trusted: masks that cancel, and shares of the noise.

A node adds its share of the noise to the sum of its users' contributions and masks the result.
The server adds the uploads of all nodes and learns their noised total and nothing else, even if it
deviates from the protocol together with up to t nodes. Read in this order:

1. `parameters` has the graph of nodes that mask each other, the noise of a share, and δ′, by which
   the total of the shares is less private than one Gaussian;
2. `protocol` has the messages of a round as pure functions of values, without network or files;
3. `simulation` runs all nodes of a round in one process.

The protocol is that of Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving
machine learning", on a sparse graph as in Bell et al. 2020, "Secure single-server aggregation with
(poly)logarithmic overhead". `docs/secure-sums.md` states what is guaranteed, and proves it.

The package relies on its callers in two points. A node sends one sum and signs one pair of lists
for an attempt, and uses a key pair once; and its consent pins the names and certificates of all
nodes.
"""
