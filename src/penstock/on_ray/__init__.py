"""Penstock on Ray: a Ray Serve application, and jobs over actors. Scales the application's
replicas, and runs ranks on several nodes."""
