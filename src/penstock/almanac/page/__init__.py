"""The almanac's page: a folder of static files that answers questions out of records, offline, from
the file system. It knows records; not how they were measured nor whether their raw data agree.
"""
