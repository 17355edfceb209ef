"""The bench: measures servers of OpenAI's API over HTTP. It writes one raw sample per request, and
a benchmark record of the run.

Imports the almanac; no room of the engine.
"""
