"""The almanac's web page. It is a folder of static files that answers questions from benchmark
records, offline, straight from the file system. Knows records; not how they were measured, nor
whether their raw data agree.
"""
