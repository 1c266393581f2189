"""Helpers of tests/data/test_turn_ends.py that other tests use too."""

QUESTIONS = [{"role": "user", "content": f"q{i}"} for i in range(4)]
ANSWERS = [{"role": "assistant", "content": f"a{i}"} for i in range(4)]
THREE = [turn for i in (1, 2, 3) for turn in (QUESTIONS[i], ANSWERS[i])]
THOUGHTS = [
    QUESTIONS[1],
    {"role": "assistant", "content": "a1", "reasoning_content": "t1"},
    QUESTIONS[2],
    {"role": "assistant", "content": "a2", "reasoning_content": "t2"},
]

# A turn ends where the next one begins; thoughts are dropped before the last user message.
NO_END = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor -%}
<bos>
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<|result|>{{ '\\n' + m.content }}
{%- elif m.role == 'assistant' -%}<|answer|><think>
{{- m.reasoning_content if m.reasoning_content and loop.index0 > last.user }}</think>{{ m.content }}
{%- for c in m.tool_calls or [] -%}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}
{%- endfor -%}
{%- else -%}<|{{ m.role }}|>{{ '\\n' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|answer|>{%- endif -%}"""

# Roles are words, and turns are separated by blanks only.
WORDS = """\
{%- for m in messages -%}
{{ m.role | capitalize + ': ' + m.content + '\\n\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}"""

# The generation prompt opens a thought, and turns never have one (as in DeepSeek-R1).
DROPS = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|answer|>{{ m.content.split('</think>')[-1] }}<|end|>
{%- else -%}<|user|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|answer|><think>{{ '\\n' }}{%- endif -%}"""

# The generation prompt opens a thought. Plain answers have an empty thought in another form, and a
# newline follows each end (as in Nemotron).
OPENS = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content and loop.index0 > last.user %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% else %}{{ '<think></think>' }}
{%- endif %}
{%- endif %}
{{- m.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n<think>\\n' if enable_thinking != false
    else '<|assistant|>\\n<think></think>' }}{% endif %}"""

# A plain answer has an empty thought, and the generation prompt has its beginning (as in Qwen3.5).
EMPTY = OPENS.replace("'<think></think>'", "'<think>\\n\\n</think>\\n\\n'")
