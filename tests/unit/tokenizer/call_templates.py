"""Chat templates that each read the calls of earlier replies in a way of their own, shortened."""

from __future__ import annotations

# DeepSeek V3, R1: calls only beside a content that is none; arguments are joined as a string.
DEEPSEEK = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {{- '<|Assistant|>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] }}
            {{- '\\n```json\\n' }}
            {{- tool['function']['arguments'] + '\\n```<|call_end|>' }}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '<|Assistant|>' + message['content'] + '<|end|>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}{% endif %}
{%- endfor %}"""

# Mistral: alternating turns, ids of nine characters, text beside calls isn't shown.
MISTRAL = """{{ bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls is defined) %}
        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}, {% endif %}
        {%- endfor %}
        {{- ']' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]' + message.content + ' ' + message.tool_call_id }}
    {%- endif %}
{%- endfor %}"""

# Llama 3.1: one call a message.
ONE_CALL = """{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- 'A{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}{{ message.role[0] + ':' + message.content }}{% endif %}
{%- endfor %}"""

# Qwen3-Coder, GLM: arguments are gone through one by one.
ITEMS = """{%- for message in messages %}
    {{- message.role[0] + ':' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<function=' + call.function.name + '>' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>' + value | string + '</parameter>' }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}"""

# Calls only where there is no content at all.
ABSENT = """{%- for message in messages %}
    {%- if 'content' in message %}{{ message.role[0] + ':' + message.content }}
    {%- else %}{{ message.tool_calls | map(attribute='function') | list | tojson }}{% endif %}
{%- endfor %}"""

# Knows no calls.
PLAIN = "{% for message in messages %}{{ message.role[0] + ':' + message.content }}{% endfor %}"

# Shows calls, but drops those beside text, and wants alternating turns.
TEXT_FIRST = """{%- for message in messages %}
    {%- if message.role == 'assistant' and messages[loop.index0 - 1].role == 'assistant' %}
        {{- raise_exception('two in succession') }}
    {%- endif %}
    {%- if message.content or not message.tool_calls %}{{ message.role[0] + ':' + message.content }}
    {%- else %}{{ message.tool_calls | tojson }}{% endif %}
{%- endfor %}"""

# gpt-oss: thoughts by another name, which stand beside calls but not beside text and calls.
GPT_OSS = """{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking!') }}
        {%- elif message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary ' }}
        {{- 'json<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{ raise_exception('no previous call!') }}{% endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "gpt_oss": GPT_OSS,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "one_call": ONE_CALL,
    "items": ITEMS,
    "absent": ABSENT,
    "plain": PLAIN,
    "text_first": TEXT_FIRST,
}
