"""Administration over the native API: cluster, buckets, views, jobs, ops and stored documents.

Law: each function sends one request, and every response becomes a frozen value. The node validates, and its
errors name the field.
"""
