"""Test support: contract suites for every seam, daemons and clusters as processes, faults.

Law: imports anything of meshd; nothing of meshd imports it. A suite is a class; a new engine subclasses
it and provides one method. boto3 and pytest are imported only where they are used.
"""
