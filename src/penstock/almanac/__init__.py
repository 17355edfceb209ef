"""The almanac: the form of a measured run's record, how its numbers are derived from its raw data,
and which records may enter.

Knows records and samples; no engine, no server and no way to measure one (see `bench`).
"""
