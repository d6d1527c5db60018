"""Audits, in which a run adds canaries to its users and measures how much its releases reveal.

An accountant bounds the leakage of a correct program; an audit measures the leakage of a real run.
Read in this order:

1. `canaries`: the invented users, the measurement of a release, and from all measurements, the
   evidence that a canary is included; `fedpriv.run.auditor` adds canaries' updates to the users';
2. `verdict`: the bound on ε that guesses about canaries prove, two tests of the noise that need no
   canaries, and the conclusion.

The guarantee does not depend on an audit, and an audit cannot weaken it: canaries are users with
invented data, and everything else is computed from releases.
"""
