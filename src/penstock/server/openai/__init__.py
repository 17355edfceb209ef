"""OpenAI's request and response bodies. Turns JSON into checked calls, and an engine's deltas into
answers."""
