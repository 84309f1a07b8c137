"""meshd.runtime."""
