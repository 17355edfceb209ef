"""The bench: measures any engine that serves OpenAI's API, over HTTP alone, and writes raw samples
and a record.

Imports the almanac; no room of the engine.
"""
