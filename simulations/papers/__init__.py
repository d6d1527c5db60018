"""Privacy claims of published papers, recomputed and held against intervals that hold the truth."""
