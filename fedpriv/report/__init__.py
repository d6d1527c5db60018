"""Reports of runs, studies and ledgers: pages, charts, tables of the terminal, JSON and CSV."""
