"""ε and δ of Poisson-sampled rounds by an integral in the complex plane."""
