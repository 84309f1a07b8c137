"""From settings to running processes: the composition root, the supervisor and the bodies of its children.

Law: the only place that knows every layer and wires them. The supervisor is single-threaded, holds no store
and no event loop, and forks after imports; whatever opens files or starts threads does so in a child.
"""
