"""What ships for tests: suites for every seam, a daemon to start, faults.

Law: imports anything of meshd, is imported by nothing of it. A suite is a class; whoever adds an engine
subclasses it and provides one method. boto3 and pytest are imported only when used.
"""
