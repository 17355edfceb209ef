"""Writes the files that deploy Penstock on Modal. The user may change them afterwards."""
