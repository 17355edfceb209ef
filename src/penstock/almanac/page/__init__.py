"""The almanac's page: a folder of static files that answers questions out of records, offline, from the file system.

build.py makes the folder, compact.py its data, downloads.py the files to take away, page_server.py shows it on this
machine; site/ is what the browser runs. It knows records; not how they were measured nor whether their raw data agree.
"""
