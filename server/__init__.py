"""The server of a deployment: enrolled nodes, the rounds that it asks of them, and two transports.

Read `deployment` first: `fedpriv serve` as a whole. Below it, `enrolment` and `certificates` say
which users and nodes there are, `authentication` who is calling, `traffic` which connections are
shut, `collection` and `service` what happens during a round over gRPC, `monitoring` what an
operator sees. `flower_runs` and `ray_engine` run the same rounds on Flower's runtime.
"""

if __name__ != "fedpriv.server":
    raise ImportError("import fedpriv.server, the one name of this package")
