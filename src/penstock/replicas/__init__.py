"""replicas: several engines behind one client: where they run, how they are started again, which
request goes where.

It knows engines' clients and processes; no device, no HTTP.
"""
