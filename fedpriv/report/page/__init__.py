"""Reports: one HTML page of a run or a study, which opens without a network."""
