"""What an answer's text holds: reasoning, tool calls and the rest, told apart as it comes; and
grammars that hold it to calls. It knows texts and schemas; no tokens, no HTTP."""
