"""Archives as the daemon serves them: indexed once per content, read by member, walked in one pass.

Law: every kind is made plain before it is read by member: a member is a range of an object, of the archive
itself or of its inflated copy, so that whatever reads ranges reads members. One package, one budget: copies
count as results of views do.
"""
