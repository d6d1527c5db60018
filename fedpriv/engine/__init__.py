"""Local training of many users in torch, for the in-process transport.

Read `transport` first. `roads` decides whether users train alone (`alone`) or together
(`side_by_side`, `lanes`, `products`), and `trainer` sums their contributions.
"""
