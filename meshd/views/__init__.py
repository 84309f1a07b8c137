"""Views: read-only buckets with objects computed on demand from another bucket, served over plain S3.

Law: a view is a bucket with an owner, policies, ACLs and tags that nobody writes to. Its content is a
function of the view document and of the source bytes, and stored results are named by both.
"""
