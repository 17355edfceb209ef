"""The bench: measures any engine that serves OpenAI's API, by HTTP alone, and leaves raw samples
and a record.

It sees the almanac below it, and no room of the engine."""
