"""The privacy mechanism: layout, clipping, queries, noise and sampling, in NumPy only.

Small enough to audit: together with `fedpriv.accounting` it is all that the guarantee rests on.
"""
