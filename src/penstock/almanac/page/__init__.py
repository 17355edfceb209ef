"""The almanac's page: a folder of static files that answers questions from records, offline,
straight from the file system. Knows records; not how they were measured, nor whether their raw data
agree.
"""
