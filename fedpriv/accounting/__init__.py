"""Events, ledger and accountants; knows no mechanism and imports no torch."""
