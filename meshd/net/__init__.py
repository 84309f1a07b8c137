"""meshd.net."""
