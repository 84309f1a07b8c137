"""meshd.cli."""
