"""Figures and tables of finished runs."""
