"""What a run is, as values and as TOML, and how its parts are made."""
