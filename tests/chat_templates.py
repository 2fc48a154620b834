"""Chat templates in the manner of those in use, and conversations for them."""

from typing import Any

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Tools as JSON, tool responses gathered into one turn, reasoning kept for the last turn alone.
CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for name, value in tool_call.arguments | items %}
            {{- name + '="' ~ value ~ '"' }}{% if not loop.last %}, {% endif %}
        {%- endfor %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

INST = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
    {{- '[INST] ' + message['content'].strip() + ' [/INST]' -}}
{% elif message['role'] == 'assistant' %}
    {{- ' ' + message['content'] + eos_token -}}
{% else %}
    {{- raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}"""

GENERATION = """\
{%- macro turn(role, text) -%}
<|im_start|>{{ role }}
{{ text }}{% if caller %}{{ caller() }}{% endif %}
{%- endmacro -%}
{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{% set said = message.content | trim %}{{ said }}<|im_end|>{% endgeneration %}

{% else %}
{% call turn(message.role, message.content) %}<|im_end|>
{% endcall %}
{% endif %}
{% if loop.index > 100 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

PARTS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endif %}<|im_end|>
{% endfor %}"""

# Documents, and a good part of what else templates use.
MISCELLANY = """\
{{ bos_token }}{% set roles = messages | map(attribute='role') | unique | list %}{{ roles | join(', ') | upper }}
{% for document in documents or [] %}[{{ loop.index }}/{{ loop.length }}] {{ document | dictsort | first | last }}
{{ document | tojson(indent=2, ensure_ascii=true) }}{{ document['text'] | default('none', true) | capitalize }}
{% endfor %}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users | length }}
{% for a, b in [(1, 2), (3, 4)] if a < 3 < b + 3 %}{{ a * b ** 2 // 3 % 5 - 1 }}{{ (a / b) | round(2) }}
{%- else %}no{% endfor %}
{{ 'x' * 3 ~ 1.5 ~ none ~ true ~ [1, 'é', {'k': 'v'}] }}{{ "%s is %05.2f" % ("x", 1.5) }}
{{ '{:>6}|{}'.format('ab', 3) }}
{% filter replace('a', 'A') %}{{ messages[-1].content | lower | indent(2) }}{% endfilter %}
{%- set block %}{% for n in range(2, 9, 3) %}{{ loop.cycle('a', 'b') }}{{ n }}{% endfor %}{% endset %}
{{ block | length }}{{ block }}{{ 'a' in 'abc' and 3 not in [1, 2] }}{{ 1 if 2 is even else 3 }}
{{ messages[0].content[1:4] }}{{ messages[0].content[::-1] }}
{{ ('<b>' | safe) + '<i>' }}{{ '<b>' | e }}
{%- macro tree(items) %}{% for item in items recursive %}{{ item.v }}{{ loop(item.c) if item.c }}{% endfor %}
{%- endmacro %}
{{ tree([{'v': 1, 'c': [{'v': 2}]}, dict(v=3)]) }}{{ 'A-b c' | title }}{{ '7' | int + 1 }}
{{ [3, 1, 2] | sort | reverse | list }}{{ [[1, 2], [0]] | min }}{{ x.y if x is defined else 'u' }}
{{ (messages | reject('string') | list | length) == (messages | length) }}"""

TEMPLATES = {
    "chatml": CHATML,
    "chatml-tools": CHATML_TOOLS,
    "headers": HEADERS,
    "inst": INST,
    "generation": GENERATION,
    "parts": PARTS,
    "miscellany": MISCELLANY,
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The "weather" of a <city> & é 🚀',
            "parameters": {"type": "object", "properties": {"n": {"type": "string", "enum": ["c", "f"]}}},
        },
    }
]
DOCUMENTS = [{"title": "é <b>", "text": "some text"}, {"title": "🚀", "text": ""}]
QUESTION = {"role": "user", "content": " Is 1 <b> 2 & café 🚀?\n"}
TURNS = [
    QUESTION,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.  "},
    {"role": "user", "content": "So?"},
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": {"n": "c", "d": [1]}}}
    ],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "turns": TURNS,
    "system": [{"role": "system", "content": "Be <good>. "}, *TURNS],
    "tool": [QUESTION, CALL, {"role": "tool", "tool_call_id": "a1", "content": '{"t": "<3"}'}],
    "reasoning": [QUESTION, {"role": "assistant", "content": "Yes", "reasoning": "one < two", "name": None}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a <"}, {"type": "text", "text": "b> "}]}],
}
