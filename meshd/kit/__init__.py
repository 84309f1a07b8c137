"""meshd.kit."""
