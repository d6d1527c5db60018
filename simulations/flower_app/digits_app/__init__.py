"""Flower's usual app on DIGITS: a ClientApp that does not use fedpriv, and a ServerApp."""
