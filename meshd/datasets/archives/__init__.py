"""Archives: indexed once per content, read by member, and streamed in one pass.

Law: a member is a range of an object: of the archive, or of its decompressed copy. So every reader of
ranges reads members. Copies share one budget with the results of views.
"""
