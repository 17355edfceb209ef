"""Chat templates that take messages as published ones do, each in a few lines of its own: what they
loop over, test, concatenate and refuse is like theirs, their words are not."""

from __future__ import annotations

# Contents are concatenated; no word for calls. A tool's message has its role.
PLAIN = """{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

# Contents go through a filter, so that None would be written; no word for calls.
TRIMMED = """{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Arguments as objects or as text; reasoning behind the last question alone; results are gathered in
# one turn.
HYBRID = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}[{{ m.role }}]{{ m.content + '\n' }}
{%- elif m.role == 'assistant' %}[assistant]
{%- set text = m.content %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ text }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}</call>{% endfor %}{{ '\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}[user]{% endif %}<result>{{ m.content }}</result>
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '\n' }}{% endif %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Calls are looked at where the content is none, and only there; arguments are concatenated.
NONE_CALLS = """{% for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}
{{- '<call>' + call['function']['name'] + '|' + call['function']['arguments'] + '</call>' }}{% endfor %}{{ '\n' }}
{%- elif m['role'] == 'tool' %}{{ '<result>' + m['content'] + '</result>\n' }}
{%- else %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Text, or parts that are joined by nothing; roles alternate; of a system's parts only the first.
ALTERNATING = """{% set first = '' %}{% set said = messages %}
{%- if messages[0]['role'] == 'system' %}{% set said = messages[1:] %}
{%- set first = messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text'] %}
{%- endif %}
{%- for m in said %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '[' + ('model' if m['role'] == 'assistant' else m['role']) + ']' + (first + ' ' if loop.first and first else '') }}
{%- if m['content'] is string %}{{ m['content'] | trim }}
{%- elif m['content'] is iterable %}{% for part in m['content'] %}{{ part['text'] | trim }}{% endfor %}
{%- else %}{{ raise_exception('neither text nor parts') }}{% endif %}{{ '\n' }}
{%- endfor %}{% if add_generation_prompt %}[model]{% endif %}"""

# Parts alone, through a filter.
PARTS = """{% for m in messages %}[{{ m.role }}]
{%- for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Of parts the first, and nothing else.
FIRST_PART = """{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# A macro reads text or parts; ids of nine; what is said beside a call isn't written.
SHORT_IDS = """{% macro body(content) %}{% if content is string %}{{ content }}
{%- else %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls %}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '<call>' }}{{ call.function | tojson }}{{ call.id }}</call>{% endfor %}{{ '\n' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '<result>' }}{{ m.content }}{{ m.tool_call_id }}</result>{{ '\n' }}
{%- elif m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ body(m.content) }}{{ '\n' }}
{%- else %}{{ raise_exception('no such role') }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# One call a turn, or none is taken; results are JSON, parts as well.
ONE_CALL = """{% for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function -%}
[assistant]{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{% elif m.role == 'tool' %}[ipython]{{ m.content | tojson }}
{% elif m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content | trim }}
{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# The first call of a turn is taken, the others left out; reasoning is `thinking`, and never beside
# content and a call.
CHANNELS = """{% for m in messages %}
{%- if m.role == 'assistant' %}
{%- if 'content' in m and '<|' in m.content %}{{ raise_exception('marks in the content') }}{% endif %}
{%- if 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if m.content or m.thinking %}<thought>{{ m.content or m.thinking }}</thought>{% endif %}
{%- set call = m.tool_calls[0].function %}<call>{{ call.name }}{{ call.arguments | tojson }}</call>
{% else %}[final]{{ m.content }}
{% endif %}
{%- elif m.role == 'tool' %}<result>{{ m.content | tojson }}</result>
{% elif m.role == 'user' %}[user]{{ m.content + '\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Arguments are gone through one by one.
ITEMS = """{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls is defined %}[assistant]{{ m.content }}
{%- for call in m.tool_calls %}<call={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}<{{ key }}>
{{- value if value is string else value | tojson }}</{{ key }}>{% endfor %}</call>{% endfor %}
{% elif m.role == 'tool' %}<result>{{ m.content }}</result>
{% else %}[{{ m.role }}]{{ m.content + '\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Reasoning is a part of the content; a turn of nothing is refused.
THINKING_PARTS = """{% for m in messages %}
{%- if m.role == 'tool' %}<result>{{ m.content | string }}</result>
{% else %}[{{ m.role }}]
{%- if not m.content and not m.tool_calls %}{{ raise_exception('a turn of nothing') }}{% endif %}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}
{%- if part.type == 'thinking' %}<think>{{ part.thinking }}</think>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{% set given = call.function.arguments %}<call>{{ call.function.name }}
{{- given if given is string else given | tojson }}</call>{% endfor %}
{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Roles that aren't known are left out without a word.
SILENT = """{% for m in messages %}
{%- if m.role in ('system', 'user', 'assistant') and m.content %}[{{ m.role }}]{{ m.content + '\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

KINDS = {
    name.lower(): value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, str) and name != "KINDS"
}
