"""The engine: the loop from requests to steps and back. It has two ends: the channel in the
engine's process and the client in the server's.

Knows requests, ids and, at the client's end, text; no HTTP."""
