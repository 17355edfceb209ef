"""Processes: the application, its connections, and how a server begins and ends."""
