"""Federated learning with user-level differential privacy that can be checked."""

__version__ = "0.1.0"
__all__ = ["__version__"]
