"""parsers: split an answer's text into reasoning, tool calls and content as it comes; and write
grammars that force valid calls. Knows texts and schemas; no tokens, no HTTP."""
