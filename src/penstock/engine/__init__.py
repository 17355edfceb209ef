"""The engine: the loop from requests to steps and back, and its two ends, the channel and the
client.

Knows requests, ids and, at the client's end, text; no HTTP."""
