"""meshd.web."""
