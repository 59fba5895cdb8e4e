"""A simulated device repeats what stands in its prompts."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.config import SimulatedDevice
from tests.support.scripted_model import SMALL

MARK, END = 3, 1
DEVICE = SimulatedDevice(step_ms=0.0, script_token_id=MARK, drafts_on="device")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 4, "page_size": 4},
        {"enable_overlap": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"max_total_tokens": 256, "max_running_requests": 4},
    ],
)
def test_outputs_are_the_scripts_of_their_prompts(options: dict[str, Any]) -> None:
    scripts = [[50 + n, 60, 61 + n] * (n + 1) for n in range(6)]
    prompts = [[7, MARK, 9, MARK, 8, MARK, *script, MARK] for script in scripts]
    with LLM(
        str(SMALL),
        device="simulated",
        simulated=DEVICE,
        enable_prefix_cache=False,
        **{"max_total_tokens": 1024} | options,
    ) as llm:
        params = SamplingParams(max_tokens=40, temperature=0)
        outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        assert [
            output.token_ids[: len(s)] for output, s in zip(outputs, scripts, strict=True)
        ] == scripts
        assert [output.finish_reason for output in outputs] == ["stop"] * 6
        cut = SamplingParams(max_tokens=2, temperature=0)
        (result,) = llm.generate([prompts[1]], cut)
        assert result.outputs[0].token_ids == scripts[1][:2]
        (result,) = llm.generate([[7, 8, 9]], params)  # no script: it ends at once
        assert result.outputs[0].finish_reason == "stop"
