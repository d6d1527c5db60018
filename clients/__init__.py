"""What runs at a node that hosts users."""
