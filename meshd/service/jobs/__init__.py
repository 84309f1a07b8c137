"""Jobs: objects and archives made into other objects in bulk, by the steward, while nobody waits.

Law: what a job writes is a function of its document and of the source as pinned when its plan was made. Each
output is written whole or not at all and says of what it was made, so that a job killed at any moment goes on
where it was: nothing lost, nothing doubled. It has the rights of whoever started it, as they are now.
"""
