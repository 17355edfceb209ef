"""A chat template that knows tools, tools, and what a model says that thinks, speaks and calls two
of them."""

from __future__ import annotations

from penstock.text.parsers.parser_registry import AnswerParsers

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{"
    " m.content or '' }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{% for c"
    " in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.city"
    " }}</tool_call>{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{{ '\n'"
    " }}{% endfor %}<assistant>{% if enable_thinking is defined and not enable_thinking"
    " %}<think>\n\n</think>\n\n{% endif %}"
)
PARSERS = AnswerParsers(
    enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": CITY},
}
PING = {"type": "function", "function": {"name": "ping"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
USER = [{"role": "user", "content": "x"}]
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Genoa"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)
ANSWER = "<think>\nLet me see.\n</think>\n\nOf course.\n" + CALLS
