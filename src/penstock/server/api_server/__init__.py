"""The server's processes: application, connections, start and end."""
