"""The server of a federation."""

if __name__ != "fedpriv.server":
    raise ImportError("import fedpriv.server, the one name of this package")
