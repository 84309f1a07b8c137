"""`mesh top`: this machine, its training jobs and the nodes behind them, on one screen.

Law: read-only. A value that cannot be read is reported missing, with the reason; rates are differences
between two snapshots. Text from other processes is bounded and sanitized before it is shown.
"""
