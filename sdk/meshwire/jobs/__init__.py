"""Jobs: their documents, and the plans that assign source files to outputs.

Law: the same document of the same user is the same job, and its outputs follow from it and the source.
"""
