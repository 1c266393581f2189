"""Helpers of tests/data/test_chat_records.py that other tests use too."""

# The arguments of transformers' apply_chat_template beside the messages.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <how> it is & 'will be' in é",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time", "nested": [[{"a": [None, 1.5]}]]}},
]
CALLING = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "Hi thére"},
    {
        "role": "assistant",
        "content": None,
        "thinking": "hm",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"where": "é"}}}],
    },
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "Rain."},
]
TOOL_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- 'tools:' }}
{%- for tool in tools %}{{- tool | tojson(true) ~ (tool | tojson) }}{%- endfor %}
{%- elif tools is not none %}{{- 'no tools' }}{%- endif %}
{%- for d in documents or [] %}{{- d | tojson(indent=2, sort_keys=true) }}{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.keys() | sort | join(',')) }}
{%- if style is defined %}{{- style }}{%- endif %}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.reasoning_content | default('') }}{{- m.content | default('') }}
{%- for call in m.tool_calls or [] %}{{- call | tojson(separators=(',', ':')) }}{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
