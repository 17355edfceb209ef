"""The almanac: what a measured run is on paper, how its numbers come out of its raw data, and who
may enter.

It knows records and samples; no engine, no server and no way to measure one (that is `bench`)."""
