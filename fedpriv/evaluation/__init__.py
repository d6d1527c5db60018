"""How good a model is: on held-out rows, on users' own data, and once they have made it theirs."""
