"""Files of Parquet, made into rows by a process of their own.

Law: pyarrow meets a foreign file only in a process that gave up everything but a socket: it can open no file,
start nothing, and takes bounded memory and time. Code belongs here when it runs in that process, or
talks to it; what a copy looks like is `meshwire.parquetrows`.
"""
