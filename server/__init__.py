"""The server of a deployment: it runs rounds on enrolled nodes over gRPC.

Read `deployment` first, which is `fedpriv serve` as a whole. `enrolment` and `certificates` define
users and nodes, `gateway` accepts connections, identifies callers and passes on what they may send,
`collection` and `service` carry out a round, and `monitoring` informs the operator.
"""

if __name__ != "fedpriv.server":
    raise ImportError("import fedpriv.server, the one name of this package")
