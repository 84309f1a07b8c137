"""meshd.telemetry."""
