"""The description of a run, as values and as TOML, and the construction of its parts."""
