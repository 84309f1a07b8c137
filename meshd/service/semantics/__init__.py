"""What S3 says of one object: versions, copies, parts, bodies, expiry; and S3's words for the store's errors.

Law: at the bottom of the services: nobody's rights are judged here, and no other node is asked.
"""
