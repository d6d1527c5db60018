"""Reports of runs, studies and ledgers: pages, figures, tables of the terminal, JSON and CSV."""
