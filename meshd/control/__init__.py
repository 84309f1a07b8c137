"""meshd.control."""
