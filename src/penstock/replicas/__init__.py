"""replicas: several engines behind one client: their placement, restarts, and the routing of
requests.

Knows engines' clients and processes; no device, no HTTP.
"""
