"""Sums over nodes whose server need not be trusted: masks that cancel, and shares of the noise.

A node adds its share of the noise to the sum of its users' contributions and masks the result.
The server adds the uploads of all nodes and learns their noised total and nothing else, even if it
deviates from the protocol together with up to t nodes. Read in this order:

1. `parameters` has the graph of nodes that mask each other, the noise of a share, and δ′, by which
   the total of the shares is less private than one Gaussian;
2. `protocol` has the messages of a round as pure functions of values, without network or files.

The protocol is that of Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving
machine learning", on a sparse graph as in Bell et al. 2020, "Secure single-server aggregation with
(poly)logarithmic overhead". `docs/secure-sums.md` states what is guaranteed, and proves it.

The package relies on the node's journal, so that a node signs one list for an attempt, takes part
in one roster for an attempt and uses a key pair once; and on the node's consent, which pins the
names and certificates of all nodes.
"""
