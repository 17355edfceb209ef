"""The server's processes: the application, its connections, start and end."""
