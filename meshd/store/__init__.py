"""meshd.store."""
