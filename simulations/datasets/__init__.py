"""Public data sets of papers, read from files in a folder, which FEDPRIV_DATA names."""
