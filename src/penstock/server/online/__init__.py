"""Online requests, from their headers to their answers."""
