"""Text to token ids and back, and parsing of answers. Has the tokenizer, chat templates,
detokenisation, stop strings, and parsers of tool calls. Knows no engine and no torch."""
