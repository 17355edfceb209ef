"""Penstock on Ray: a Serve application, and jobs over actors. Scales the application's replicas,
and runs ranks on several nodes."""
