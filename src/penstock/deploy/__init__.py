"""Writes what takes Penstock to somebody else's machines, as files that are then the user's own."""
