"""A model folder for `device: simulated` whose chat template decides what is answered.

The template writes the answer into the prompt, between two marks, and the device repeats it. So a
scripted model stands behind the whole real server: tokenizer, scheduler, parsers, streams.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.common import REPO_ROOT

SMALL = REPO_ROOT / "models" / "manta-small"
MARK = "<|script|>"
STEPS_DONE = "STEPS DONE: "
"""What a summary says, before a number and a full stop, so that the script goes on behind it."""


def call(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_scripted_model(
    folder: Path, steps: list[str], last: str, *, summary_sign: str, summary: str, context: int
) -> dict[str, Any]:
    """Write the folder. Returns the keys of its configuration.

    The model writes the steps one by one, counting the calls of the conversation, and at last
    `last`. Where the last message has `summary_sign`, it writes `summary`, with the number of steps
    that are done in place of `NUMBER`. `context`: the model's context length in tokens.
    """
    shutil.copytree(SMALL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    mark = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": mark, "content": MARK})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": mark + 1, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    template = _TEMPLATE
    for name, value in {
        "STEPS": steps,
        "LAST": last,
        "SIGN": summary_sign,
        "SUMMARY": summary.replace("NUMBER", f"{STEPS_DONE}NUMBER."),
        "DONE": STEPS_DONE,
    }.items():
        template = template.replace(f"<<{name}>>", json.dumps(value))
    (folder / "chat_template.jinja").write_text(template.replace("<<MARK>>", MARK))
    return {
        "model": str(folder),
        "served_model_name": "scripted",
        "device": "simulated",
        "simulated": {"step_ms": 1.0, "script_token_id": mark},
        "enable_prefix_cache": False,
        "max_total_tokens": 8 * context,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 65536,
    }


_TEMPLATE = """
{%- set state = namespace(done=0, text='') -%}
{{- bos_token }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}
    {%- set content = message['content'] or '' %}
    {{- '<|' ~ message['role'] ~ '|>' ~ content ~ '<|end|>' }}
    {%- for call in message['tool_calls'] or [] %}
        {{- call | tojson }}
        {%- set state.done = state.done + 1 %}
    {%- endfor %}
    {%- if <<DONE>> in content %}
        {%- set state.done = state.done + (content.split(<<DONE>>)[1].split('.')[0] | int) %}
    {%- endif %}
    {%- set state.text = content %}
{%- endfor %}
{%- set steps = <<STEPS>> %}
{%- if <<SIGN>> in state.text %}
    {%- set reply = <<SUMMARY>> | replace('NUMBER', state.done | string) %}
{%- else %}
    {%- set reply = steps[state.done] if state.done < steps | length else <<LAST>> %}
{%- endif %}
{{- '<|assistant|><<MARK>>' ~ reply ~ '<<MARK>>' }}
"""
