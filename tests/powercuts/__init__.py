"""Power cuts under real daemons, on a file system that forgets what was not synced."""
