"""What Manta measures, under the names of vLLM's metrics, for dashboards made for vLLM.

The names are those of vLLM's V1 engine. Only what is measured stands here: docs/metrics.md lists
the rest. Labels are `model_name`, and vLLM's `engine` where an engine measures; what an ingress
measures has its `ingress` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deploy.http.metrics.engine_stats import EngineStats
from deploy.http.metrics.exposition import Family, joined, label_text, sample, scalar
from deploy.http.metrics.histogram import HistogramFamily, histogram_lines

HISTOGRAMS = {
    "manta_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "manta_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "manta_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "manta_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "manta_queue_time_seconds": "vllm:request_queue_time_seconds",
    "manta_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "manta_decode_time_seconds": "vllm:request_decode_time_seconds",
    "manta_inference_time_seconds": "vllm:request_inference_time_seconds",
    "manta_sequence_prompt_tokens": "vllm:request_prompt_tokens",
    "manta_sequence_generation_tokens": "vllm:request_generation_tokens",
    "manta_max_generation_tokens": "vllm:request_max_num_generation_tokens",
    "manta_params_max_tokens": "vllm:request_params_max_tokens",
    "manta_params_n": "vllm:request_params_n",
}
"""vLLM's name of each of our histograms."""
FINISHED_REASONS = ("stop", "length", "abort", "error")

_ENGINE = (
    ("vllm:num_requests_running", "gauge", "Requests that run.", "num_running"),
    ("vllm:num_requests_waiting", "gauge", "Requests that wait.", "num_waiting"),
    (
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens, those from the prefix cache included.",
        "prompt_tokens_total",
    ),
    (
        "vllm:prompt_tokens_cached_total",
        "counter",
        "Prompt tokens from the prefix cache.",
        "cached_tokens_total",
    ),
    ("vllm:generation_tokens_total", "counter", "Generated tokens.", "generation_tokens_total"),
    (
        "vllm:prefix_cache_queries_total",
        "counter",
        "Tokens that were looked up in the prefix cache.",
        "prompt_tokens_total",
    ),
    (
        "vllm:prefix_cache_hits_total",
        "counter",
        "Tokens that were found in the prefix cache.",
        "cached_tokens_total",
    ),
    (
        "vllm:spec_decode_num_drafts_total",
        "counter",
        "Rows of steps that checked drafts.",
        "spec_decode_drafts_total",
    ),
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "counter",
        "Drafts that were checked.",
        "spec_decode_draft_tokens_total",
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_total",
        "counter",
        "Drafts that were accepted.",
        "spec_decode_accepted_tokens_total",
    ),
)


def ingress_families(
    histograms: list[HistogramFamily], finished: Mapping[str, float], labels: str
) -> list[Family]:
    """What one ingress measures. `finished`: sequences by how they ended; `labels`: text of labels
    that every sample has."""
    found = [
        Family(name, "histogram", ours.help, "".join(histogram_lines(name, labels, ours.sum())))
        for ours in histograms
        if (name := HISTOGRAMS.get(ours.name)) is not None
    ]
    reasons = dict.fromkeys(FINISHED_REASONS, 0.0) | dict(finished)
    success = [
        (joined(label_text({"finished_reason": reason}), labels), count)
        for reason, count in reasons.items()
    ]
    help_text = "Finished sequences by how they ended."
    return [*found, scalar("vllm:request_success_total", "counter", help_text, success)]


def engine_families(stats: EngineStats, labels: str) -> list[Family]:
    """What the engines measure. `labels`: text of labels that every sample has."""

    def of(replica: str) -> str:
        return joined(label_text({"engine": replica}), labels)

    found = [
        scalar(name, kind, help_text, [(of(r), values[0]) for r, values in stats.by_replica(key)])
        for name, kind, help_text, key in _ENGINE
    ]
    # A retracted request gives its memory up and is computed again: vLLM calls that preemption.
    # Ours tell whether memory was short (retraction) or something more urgent came (preemption).
    given_up = stats.by_replica("retractions_total", "preemptions_total")
    found.append(
        scalar(
            "vllm:num_preemptions_total",
            "counter",
            "Times that a running request gave its memory up.",
            [(of(replica), sum(values)) for replica, values in given_up],
        )
    )
    used = stats.by_replica("kv_used_tokens", "kv_total_tokens")
    found.append(
        scalar(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "Share of the KV cache that requests hold; 1 means all of it.",
            [(of(replica), held / total) for replica, (held, total) in used if total],
        )
    )
    found.append(
        scalar(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Drafts that were accepted, by their place in the step.",
            stats.by_position("spec_decode_accepted_per_position_total", of),
        )
    )
    found.append(_iterations(stats, of))
    return found


def _iterations(stats: EngineStats, of: Callable[[str], str]) -> Family:
    """Steps and the tokens that they computed. Of single steps nothing is kept, so there is one
    bucket. `of`: labels of a replica."""
    name, keys = (
        "vllm:iteration_tokens_total",
        (
            "steps_total",
            "prompt_tokens_total",
            "cached_tokens_total",
            "generation_tokens_total",
        ),
    )
    lines = []
    for replica, (steps, prompt, cached, generated) in stats.by_replica(*keys):
        labels = of(replica)
        lines += [
            sample(f"{name}_bucket", joined(labels, 'le="+Inf"'), steps),
            sample(f"{name}_count", labels, steps),
            sample(f"{name}_sum", labels, prompt - cached + generated),
        ]
    return Family(name, "histogram", "Tokens computed in a step.", "".join(lines))
