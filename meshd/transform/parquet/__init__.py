"""Parquet files, converted to rows in a child process of their own.

Law: pyarrow reads untrusted files only in a process that kept nothing but a socket: it can open no
file, start no process, and has bounded memory and time. Code belongs here if it runs in that process or
talks to it; the row format is defined in `meshwire.formats`.
"""
