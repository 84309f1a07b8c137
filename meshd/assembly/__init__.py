"""meshd.assembly."""
