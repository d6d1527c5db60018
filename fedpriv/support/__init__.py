"""Tools that every package may use: files on disk, imports by path, logs and checks."""
