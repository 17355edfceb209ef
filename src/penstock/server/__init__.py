"""OpenAI's API over HTTP: bodies in, answers and events out. It knows the engine by its client."""
