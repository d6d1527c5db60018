"""Reports of runs, studies and ledgers: pages, figures, tables of the terminal, JSON and CSV.

`charts` draws one declaration of a chart for pages and documents; `page` is what an HTML page is
made of. `run_page`, `study_page` and `guarantee` (what ε says) fill pages and draw figures from
`records`; `studies` and `tables` also print, and write for other programs.
"""
