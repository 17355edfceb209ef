"""replicas: several engines behind one client. Handles their placement on GPUs, their restarts, and
the routing of requests.

Knows engines' clients and processes; no device, no HTTP.
"""
