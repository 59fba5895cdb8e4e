"""`ReasoningFormat`: how a family of models marks its reasoning."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deploy.http.parsers import harmony
from deploy.http.parsers.tool_parser import ToolParser, Tools
from engine.constraints.grammar_payload import Thinking
from engine.registry import Registry


class ReasoningFormat(NamedTuple):
    """`start` and `end` stand around the thought, `answer` before an answer that follows it.
    `sign` is what the chat templates of such models show."""

    start: str
    end: str
    sign: str
    answer: str = ""
    read: Callable[[Tools, Thinking | None], ToolParser] | None = None
    """Makes what reads whole outputs, where thoughts and calls alternate; `Thinking` None: the
    prompt ends within an answer. None: thoughts end before all else."""

    def thinking(self, *, is_open: bool) -> Thinking:
        """How an output begins to think. `is_open`: the prompt ends within a thought."""
        return Thinking(self.start, self.end, is_open, self.answer)


THINK = ReasoningFormat("<think>", "</think>", sign="</think>")
GRANITE = ReasoningFormat(
    "Here is my thought process:", "Here is my response:", sign="Here is my thought process:"
)
HARMONY = ReasoningFormat(
    harmony.ANALYSIS,
    harmony.END + harmony.NEXT,
    sign=harmony.CHANNEL,
    answer=harmony.FINAL,
    read=harmony.read_channels,
)
REASONING_FORMATS: Registry[ReasoningFormat] = Registry(
    "reasoning_parser",
    {
        "deepseek_r1": THINK,
        "qwen3": THINK,
        "deepseek_v3": THINK,
        "glm45": THINK,
        "minimax_m2": THINK,
        "granite": GRANITE,
        "openai_gptoss": HARMONY,
        "gpt_oss": HARMONY,
    },
)
"""By vLLM's and SGLang's names. Whether a thought begins in the prompt is seen there."""
