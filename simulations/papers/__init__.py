"""Privacy claims of published papers, recomputed and held against certified intervals."""
