"""A run: its folder, its rounds, and the commands that start and read it."""
