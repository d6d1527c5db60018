"""The nodes of a deployment: each hosts users and trains on their data.

Read `membership` first, which is `fedpriv join` as a whole. `connection` makes the calls to the
server, `consent`, `journal` and `ledger_check` decide whether the node takes part in a round,
`worker` and `training` train in a process of their own, and `users` loads the data.
"""

if __name__ != "fedpriv.clients":
    raise ImportError("import fedpriv.clients, the one name of this package")
