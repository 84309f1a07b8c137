"""meshd.service."""
