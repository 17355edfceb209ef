"""OpenAI's bodies: JSON to checked calls, and deltas to answers."""
