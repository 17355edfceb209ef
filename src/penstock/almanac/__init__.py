"""The almanac: a collection of benchmark records. Defines the format of a benchmark record (one
measured run), how its numbers are derived from the raw data, and which records are accepted.

Knows records and samples; no engine, no server and no way to measure one (see `bench`).
"""
