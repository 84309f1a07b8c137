"""`mesh top`: this machine, its training jobs and the nodes behind them, on one screen.

Law: read-only. A value that cannot be read is reported as missing, with the reason. Rates are differences
between two snapshots. Text from other processes is shortened and sanitized before it is shown.
"""
