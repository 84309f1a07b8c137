"""meshd.testing."""
