"""Flower's usual app on DIGITS: a ClientApp that knows nothing of fedpriv, and a ServerApp."""
