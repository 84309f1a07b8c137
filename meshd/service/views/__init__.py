"""Views: buckets whose objects are made of another bucket's on demand, and read by plain S3.

Law: a view is a bucket (it has an owner, policies, ACLs, tags) that nobody writes to. What it gives is a
function of its document and the source's bytes, kept under a name that says both.
"""
