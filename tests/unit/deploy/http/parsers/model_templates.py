"""What of published chat templates tells how their models write calls and thoughts: the parts that
show tools, earlier calls and the beginning of a reply, shortened."""

from __future__ import annotations

from typing import NamedTuple


class ModelTemplate(NamedTuple):
    """A template, and the words of the forms that it shows."""

    template: str
    tools: str
    reasoning: str


_QWEN3 = """\
{%- if tools %}
{{- "<tools>" }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{- "</tools>\\n\\nFor each \
function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \
\\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1] %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for tool_call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endfor %}"""
_QWEN3_CODER = """\
{%- if tools %}
{{- "# Tools\\n\\n<tools>" }}{%- for tool in tools %}
{{- "\\n<function>\\n<name>" ~ tool.function.name ~ "</name>" }}
{%- endfor %}
{{- "If you choose to call a function ONLY reply in the following format:\\n\\n<tool_call>\\n\
<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n\
</function>\\n</tool_call>" }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- endfor %}"""
_GLM45 = """\
[gMASK]<sop>
{%- if tools -%}<|system|>
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{%- endif -%}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|assistant|>' -}}{{- '\\n<think></think>' if not enable_thinking else '' -}}"""
_MINIMAX_M2 = """\
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- if tools -%}{{- '\\n' ~ '<invoke name="tool-name-1">' }}
{{- '<parameter name="param-key-1">param-value-1</parameter>\\n</invoke>' }}{%- endif -%}
{{- '<think>' ~ '\\n' ~ reasoning_content ~ '\\n' ~ '</think>' ~ '\\n\\n' }}
{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}"""
_DEEPSEEK_V3 = """\
{% if tools %}{% for tool in tools %}### {{ tool.function.name }}{% endfor %}{% endif %}
{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'
+ tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n'
+ '```' + '<｜tool▁call▁end｜>'}}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}"""
_DEEPSEEK_R1 = (
    _DEEPSEEK_V3 + """{{ content.split('</think>')[-1] }}{{'<｜Assistant｜><think>\\n'}}"""
)
_DEEPSEEK_V31 = """\
{% if tools %}{% for tool in tools %}### {{ tool.function.name }}{% endfor %}{% endif %}
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'
+ tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{{'<｜tool▁calls▁end｜>'}}
{{'<｜Assistant｜>'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}"""
_GPT_OSS = """\
{%- if tools -%}{{- "# Tools\\n\\nnamespace functions {\\n" }}{%- endif -%}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
{{- tool_call.arguments|tojson }}{{- "<|call|>" }}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
_GRANITE_32 = """\
{%- if tools and thinking %}
{%- set system_message = system_message + " You are a helpful AI assistant with access to the \
following tools. When a tool is required to answer the user's query, respond with <|tool_call|> \
followed by a JSON list of tools used." %}
{%- elif thinking %}
{%- set system_message = system_message + "Write the thoughts after 'Here is my thought process:' \
and write the response after 'Here is my response:' for each user query." %}
{%- endif %}"""
_GRANITE_4 = """\
{%- set tools_system_message_suffix = '\\n</tools>\\n\\nFor each tool call, return a json object \
with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": \
<function-name>, "arguments": <args-json-object>}\\n</tool_call>' %}
{%- if tools %}{{ tools_system_message_suffix }}{% endif %}"""
_LLAMA4 = """\
{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": \
dictionary of argument name and its value}.' }}{%- endif %}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' -}}{{- '<|python_start|>' }}
{{- message.content }}{{- '<|python_end|>' }}{{- '"parameters": ' }}"""
_LLAMA32 = """\
{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": \
dictionary of argument name and its value}.' }}{%- endif %}{{- '"parameters": ' }}"""
_LLAMA31 = _LLAMA32 + """{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
_MISTRAL = """\
{%- if tools is not none %}{{- "[AVAILABLE_TOOLS] [" }}{%- endif %}{{- "[TOOL_CALLS] [" }}"""
_GEMMA3 = """\
{%- if tools is not none %}{{- 'If you decide to invoke any of the function(s), you MUST put it in \
the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), \
func_name2(params)]' }}{%- endif %}<start_of_turn>model"""
_GEMMA3_JSON = """\
{%- if tools is not none %}{{- 'If you choose to call one or more functions, respond in the \
format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- endif %}<start_of_turn>model"""
_GEMMA3_OWN = "{{ bos_token }}{{ '<start_of_turn>' + role }}{{ messages }}"

MODEL_TEMPLATES = {
    "Qwen3": ModelTemplate(_QWEN3, "hermes", "deepseek_r1"),
    "Qwen3-Coder": ModelTemplate(_QWEN3_CODER, "qwen3_coder", ""),
    "GLM-4.5": ModelTemplate(_GLM45, "glm45", "deepseek_r1"),
    "MiniMax-M2": ModelTemplate(_MINIMAX_M2, "minimax_m2", "deepseek_r1"),
    "DeepSeek-V3": ModelTemplate(_DEEPSEEK_V3, "deepseek_v3", ""),
    "DeepSeek-R1": ModelTemplate(_DEEPSEEK_R1, "deepseek_v3", "deepseek_r1"),
    "DeepSeek-V3.1": ModelTemplate(_DEEPSEEK_V31, "deepseek_v31", "deepseek_r1"),
    "gpt-oss": ModelTemplate(_GPT_OSS, "gpt_oss", "gpt_oss"),
    "Granite 3.2": ModelTemplate(_GRANITE_32, "granite", "granite"),
    "Granite 4": ModelTemplate(_GRANITE_4, "hermes", ""),
    "Llama 4": ModelTemplate(_LLAMA4, "llama4_pythonic", ""),
    "Llama 3.2": ModelTemplate(_LLAMA32, "llama3_json", ""),
    "Llama 3.1": ModelTemplate(_LLAMA31, "llama3_json", ""),
    "Mistral": ModelTemplate(_MISTRAL, "mistral", ""),
    "Gemma 3 with vLLM's template": ModelTemplate(_GEMMA3, "pythonic", ""),
    "Gemma 3 with vLLM's template for JSON": ModelTemplate(_GEMMA3_JSON, "llama3_json", ""),
    "Gemma 3": ModelTemplate(_GEMMA3_OWN, "", ""),
}
