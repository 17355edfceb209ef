"""Penstock on Ray: an application of Ray Serve with its scaling, jobs over actors of a cluster,
ranks on several nodes."""
