"""parsers: split answers into reasoning, tool calls and content. They work on streams, and also
write grammars that force valid calls. Knows texts and schemas; no tokens, no HTTP."""
