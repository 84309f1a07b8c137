"""From settings to running processes: the supervisor, its children, and the composition root (`wiring`).

This is the only package that knows every layer. The supervisor is single-threaded, holds no store and no
event loop, and forks after all imports. Code that opens files or starts threads runs in a child.
"""
