"""OpenAI's API over HTTP: bodies in, answers and events out.
Knows the engine only by its client."""
