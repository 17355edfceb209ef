"""Takes Penstock to somebody else's machines: files that are then the user's own, and an
application of Ray Serve."""
