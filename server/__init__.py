"""The server of a deployment: enrolled nodes, and the rounds that it asks of them over gRPC.

Read `deployment` first: `fedpriv serve` as a whole. Below it, `enrolment` and `certificates` say
which users and nodes there are, `authentication` who is calling, `traffic` which connections are
shut, `collection` and `service` what happens during a round, `monitoring` what an operator sees.
"""

if __name__ != "fedpriv.server":
    raise ImportError("import fedpriv.server, the one name of this package")
