"""Penstock on Ray: a Serve application with its scaling, jobs over actors of a cluster, ranks on
several nodes."""
