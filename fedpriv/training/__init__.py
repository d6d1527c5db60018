"""The plan of a run, the functions of one round, and the loop over rounds.

Start with `plan` and `rounds`. Nothing here can weaken the guarantee: only `fedpriv.privacy` draws
users and releases sums.
"""
