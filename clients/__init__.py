"""A node, which hosts users and trains on their data."""

if __name__ != "fedpriv.clients":
    raise ImportError("import fedpriv.clients, the one name of this package")
