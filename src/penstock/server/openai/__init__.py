"""OpenAI's request and response bodies: JSON to checked calls, and deltas to answers."""
