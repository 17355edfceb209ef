"""OpenAI's API over HTTP, on top of an engine. Knows the engine only by its client."""
