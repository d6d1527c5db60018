"""Audits, in which a run adds canaries to its users and measures how much its releases reveal.

An accountant bounds the leakage of a correct program; an audit measures that of a real run.
Read in this order:

1. `canaries`: the invented users, and the measurement of a release; `fedpriv.run.auditor` adds
   their updates to those of the users;
2. `one_run`: the evidence that a canary is included, from all measurements, and the bound on ε that
   guesses about canaries prove;
3. `verdict`: the conclusion, and two tests of the noise that need no canaries.

The guarantee does not depend on an audit, and an audit cannot weaken it: canaries are users with
invented data, and everything else is computed from releases.
"""
