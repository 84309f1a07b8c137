"""User-defined ops: pushed modules, the sandbox processes that run them, and the restrictions on those.

Law: user code never runs in a daemon process. It runs in a process started for one build of one module
that inherits nothing from the daemon and restricts itself before the first line of the module runs; its
replies are untrusted input. Killing such a process costs one sample a retry.
"""
