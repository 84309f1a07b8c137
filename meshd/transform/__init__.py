"""meshd.transform."""
