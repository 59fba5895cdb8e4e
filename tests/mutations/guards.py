"""The guards that `make test-mutations` takes out, and the tests that rely on them.

A guard is named by its text, so a change of the code may have to change its line here; the tests
themselves know nothing of it.
"""

from __future__ import annotations

import pytest

from engine.kvcache import KVPoolError
from tests.mutations.mutation import Edit, mutation

PITFALLS = "tests/unit/scheduler/test_overlap_pitfalls.py"
PLACEHOLDERS = "tests/unit/scheduler/test_overlap_placeholders.py"
SAMPLING = "tests/unit/scheduler/test_overlap_sampling.py"
DRAFTS = "tests/unit/speculative/test_draft_pitfalls.py"
WINDOWS = "tests/unit/kvcache/test_window_pages.py"
GRAPHS = "tests/unit/worker/test_decode_graphs.py"
RECORDED = "tests/unit/models/test_recorded_decodes.py"

FLEX = "tests/unit/scheduler/test_flex.py"
ADAPTERS = "tests/unit/scheduler/test_adapters.py"
BATCHES = "tests/unit/deploy/http/test_batches.py"

ADAPTER_REF = "engine/protocol/adapters.py"
ADAPTER_TABLE = "engine/scheduler/adapters.py"
COMMITTER = "engine/scheduler/committer.py"
DELAYED_SAMPLE = "engine/scheduler/delayed_sample.py"
FUTURE_MAP = "engine/worker/future_map.py"
GRAMMAR = "engine/constraints/grammar.py"
LINES = "deploy/http/batches/output.py"
PLANNER = "engine/scheduler/prefill_planner.py"
PENALTIES = "engine/sampling/features/penalties.py"
RECORDED_DECODES = "engine/models/recorded_decodes.py"
REQUESTS = "engine/scheduler/requests.py"
RUNNING_BATCH = "engine/scheduler/running_batch.py"
SCHEDULER = "engine/scheduler/scheduler.py"
STEP_FILLER = "engine/speculative/step_filler.py"
SIZES = "engine/worker/graphs/sizes.py"

FREED_AT_ONCE = Edit(REQUESTS, "return any(r is req for mb", "return False and any(r is req for mb")
EXTRA_TOKEN_KEPT = (
    Edit(COMMITTER, "                if req.status is finished:\n", "                if False:\n"),
    Edit(
        COMMITTER,
        "if req.status is not finished:\n                if line",
        "if True:\n                if line",
    ),
)
WRITTEN_PLACEHOLDERS = (
    # roseinfer's way: launching a step appends a placeholder, its result replaces it.
    Edit(
        SCHEDULER,
        "mb.in_flight.append(launched)",
        "mb.in_flight.append(launched); [r.output_ids.append(-1) for r in launched.sampled]",
    ),
    Edit(
        COMMITTER,
        "output.append(token)\n                else",
        "output[output.index(-1)] = token\n                else",
    ),
    Edit(COMMITTER, "output += run", "output[output.index(-1)] = run[0]"),
    Edit(
        COMMITTER,
        "output.append(token)\n                if token",
        "output[output.index(-1)] = token\n                if token",
    ),
)
UNRESOLVED = Edit(FUTURE_MAP, "if len(inputs) == 0:", "if True:")

MUTATIONS = [
    # A request that leaves while a step with it is in flight
    mutation(PITFALLS, "test_aborted_request_keeps_its_memory", "row of a step", FREED_AT_ONCE),
    mutation(PITFALLS, "test_aborted_chunk_keeps_its_memory", "row of a step", FREED_AT_ONCE),
    mutation(
        PITFALLS,
        "test_aborted_chunk_keeps_its_memory",
        r"43 == \(32 \+ 3\)",
        Edit(REQUESTS, "self._forget_chunked(req)\n        if told", "pass\n        if told"),
    ),
    mutation(PITFALLS, "test_finished_request_keeps_its_memory", "row of a step", FREED_AT_ONCE),
    mutation(
        PITFALLS, "test_finished_request_keeps_its_memory", "token after the end", *EXTRA_TOKEN_KEPT
    ),
    mutation(
        PITFALLS,
        "test_retracted_request_keeps_its_memory",
        "of a step in flight is free",
        FREED_AT_ONCE,
    ),
    mutation(PITFALLS, "test_token_in_flight_outlives_retraction", "'c', 1", FREED_AT_ONCE),
    mutation(PITFALLS, "test_retracted_chunk_starts_over", "row of a step", FREED_AT_ONCE),
    mutation(
        PITFALLS,
        "test_retracted_chunk_starts_over",
        "Counter",
        Edit(REQUESTS, "self._forget_chunked(req)\n        req.status", "pass\n        req.status"),
    ),
    mutation(PITFALLS, "test_preempted_request_keeps_its_memory", "row of a step", FREED_AT_ONCE),
    mutation(PITFALLS, "test_late_step_of_an_aborted_request", "'c', 2", FREED_AT_ONCE),
    mutation(PITFALLS, "test_late_step_of_a_finished_request", "'c', 2", FREED_AT_ONCE),
    mutation(PITFALLS, "test_late_step_of_a_retracted_request", "'c', [12]", FREED_AT_ONCE),
    mutation(
        PITFALLS,
        "test_rows_do_not_shift",
        "zip",
        Edit(RUNNING_BATCH, "self.reqs = [self", "self.reqs[:] = [self"),
        raises=ValueError,
    ),
    mutation(
        PITFALLS,
        "test_stop_string_in_flight",
        "NoneType",
        Edit("engine/tokenizer/detokenizer_manager.py", "if request is None:", "if False:"),
        raises=AttributeError,
    ),
    mutation(PITFALLS, "test_stop_string_in_flight", "token after abort", *EXTRA_TOKEN_KEPT),
    mutation(PITFALLS, "test_stop_string_in_flight", "row of a step", FREED_AT_ONCE),
    # Freeing twice
    mutation(
        PITFALLS,
        "test_abort_of_a_retracting_request_frees_once",
        "'c', 1",
        Edit(REQUESTS, "not any(r is req for r in self.leaving)", "True"),
        raises=KeyError,
    ),
    mutation(
        PITFALLS,
        "test_retracting_request_that_ends_is_freed_once",
        "'c', 1",
        Edit(REQUESTS, "self.leaving = [r for r in self.leaving if r is not req]", "pass"),
        raises=KeyError,
    ),
    mutation(
        PITFALLS,
        "test_abort_after_the_end_ends_nothing_twice",
        "ended twice",
        Edit(SCHEDULER, "if req is not None and not req.finished:", "if req is not None:"),
    ),
    mutation(
        PITFALLS,
        "test_waiting_request_frees_nothing",
        "row 0",
        Edit(
            "engine/scheduler/kv_manager.py",
            "if req.last_node is None or not req.req_pool_idx:",
            "if False:",
        ),
        raises=KVPoolError,
    ),
    # Waiting for what is about to come free
    mutation(
        PITFALLS,
        "test_decode_waits_for_a_request_that_ends_in_flight",
        "retracted for room",
        Edit(
            "engine/scheduler/victims.py",
            "if any(id(r) not in running and not r.finished for r in ending):",
            "if False:",
        ),
    ),
    mutation(
        PITFALLS,
        "test_decode_waits_for_a_leaving_request",
        "retracted for room",
        Edit(SCHEDULER, "if self.requests.leaving or ", "if "),
    ),
    mutation(
        PITFALLS,
        "test_preemption_waits_for_a_leaving_request",
        "preempted for a row",
        Edit("engine/scheduler/prefill_planner.py", " or self._requests.leaving", ""),
    ),
    # Placeholders
    mutation(
        PLACEHOLDERS,
        "test_placeholders_do_not_count_as_output",
        "one more item",
        *WRITTEN_PLACEHOLDERS,
    ),
    mutation(
        PLACEHOLDERS,
        "test_no_step_beyond_the_last_token",
        "beyond the limit",
        Edit(RUNNING_BATCH, "len(r.output_ids) > 1", "len(r.output_ids) > 0"),
    ),
    mutation(
        PLACEHOLDERS,
        "test_no_step_beyond_the_last_token",
        "beyond the limit",
        Edit(RUNNING_BATCH, "self.remaining = self.remaining - 1", "pass"),
    ),
    mutation(
        PLACEHOLDERS,
        "test_placeholders_never_reach_the_detokenizer",
        "too small",
        *WRITTEN_PLACEHOLDERS,
        Edit(
            COMMITTER,
            "elif len(output) >= req.max_new_tokens:",
            "elif sum(t >= 0 for t in output) >= req.max_new_tokens:",
        ),
        Edit(
            COMMITTER,
            "self._outputs.close(step.step, rids, tokens, readers, counts)",
            "self._outputs.close(step.step, rids, "
            "[r.output_ids[-1] for r in step.sampled], readers, counts)",
        ),
        raises=OverflowError,
    ),
    mutation(
        PLACEHOLDERS,
        "test_tokens_of_a_failed_row_are_no_output",
        "2 == 1",
        Edit(COMMITTER, "[[] if line in failed else [token] for", "[[token] for"),
    ),
    mutation(
        PLACEHOLDERS,
        "test_tokens_of_a_failed_row_are_no_output",
        "token after the end",
        *EXTRA_TOKEN_KEPT,
    ),
    mutation(PLACEHOLDERS, "test_input_is_the_token_of_the_step_before", "-1, 40] == ", UNRESOLVED),
    mutation(
        PLACEHOLDERS,
        "test_input_is_the_token_of_the_step_before",
        "22, 11] == ",
        Edit(FUTURE_MAP, "torch.where(inputs < 0, known, inputs)", "known"),
    ),
    mutation(
        PLACEHOLDERS,
        "test_input_is_the_token_of_the_step_before",
        "-1, 40] == ",
        Edit(
            FUTURE_MAP,
            "inputs.copy_(torch.where(inputs < 0, known, inputs))",
            "batch.input_ids = torch.cat((batch.input_ids[:2], "
            "torch.where(inputs < 0, known, inputs)))",
        ),
    ),
    mutation(
        PLACEHOLDERS,
        "test_messages_keep_their_inputs",
        "req_pool_indices changed",
        Edit(
            RUNNING_BATCH,
            "setattr(self, name, getattr(self, name)[kept])",
            "old = getattr(self, name); new = old[kept]; setattr(self, name, new); "
            "old[: len(kept)] = new if name == 'rows' else old[: len(kept)]",
        ),
    ),
    mutation(
        PLACEHOLDERS,
        "test_sent_tokens_are_the_last_ones",
        "'c', 1",
        Edit(SCHEDULER, ">= lookahead:", ">= 2:"),
    ),
    mutation(
        PLACEHOLDERS,
        "test_forward_waits_for_the_token_of_a_delayed_sample",
        "older than its last",
        Edit(
            "engine/worker/step_queue.py",
            "if not self._unsampled:\n            return False",
            "if True:\n            return False",
        ),
    ),
    # Sampling with a step in flight
    mutation(SAMPLING, "test_penalties", "out of range", UNRESOLVED, raises=IndexError),
    mutation(
        SAMPLING,
        "test_penalties",
        "index 0 diff",
        Edit(
            PENALTIES,
            "index = plan.pool_rows * self.vocab_size",
            "return\n        index = plan.pool_rows * self.vocab_size",
        ),
    ),
    mutation(
        SAMPLING,
        "test_min_tokens",
        "index 1 diff",
        Edit(
            "engine/sampling/features/min_tokens.py",
            "[banned.min_len for _, banned in found]",
            "[0 for _ in found]",
        ),
    ),
    mutation(
        SAMPLING,
        "test_extra_token_leaves_no_trace",
        "index 1 diff",
        Edit(PENALTIES, "self.counts.index_fill_(0, index, 0.0)", "pass"),
    ),
    mutation(
        SAMPLING,
        "test_extra_token_leaves_no_trace",
        "index 1 diff",
        Edit(PENALTIES, "self.seen.index_fill_(0, index, 0.0)", "pass"),
    ),
    mutation(SAMPLING, "test_retraction", "index 0 diff", FREED_AT_ONCE),
    # Drafts
    mutation(
        DRAFTS,
        "test_a_stop_token_within_an_accepted_run",
        "token after the end|token after abort",
        *EXTRA_TOKEN_KEPT,
    ),
    mutation(
        DRAFTS,
        "test_a_stop_token_within_an_accepted_run",
        r"\('c', \d\)",
        Edit(COMMITTER, "and req.stop_ids.isdisjoint(run)", "and True"),
    ),
    mutation(
        DRAFTS,
        "test_a_stop_token_within_an_accepted_run",
        r"\('c', \d\)",
        Edit(COMMITTER, "                if end is not None:\n                    break\n", ""),
    ),
    mutation(
        DRAFTS,
        "test_outputs_end_at_their_length",
        "no end in sight",
        Edit(COMMITTER, "len(output) + len(run) < req.max_new_tokens", "True"),
        raises=pytest.fail.Exception,
    ),
    mutation(
        DRAFTS,
        "test_outputs_end_at_their_length",
        "too few KV slots",
        Edit(STEP_FILLER, "min(count, limits[row] - lens[row] - 2)", "count"),
        Edit(
            RUNNING_BATCH,
            "self.limits - self.most - 2",
            "self.limits - self.most + 9",
        ),
        raises=ValueError,
    ),
    mutation(
        DRAFTS,
        "test_a_slot_that_has_another_request",
        "another request's tokens",
        Edit(STEP_FILLER, " or current[row] != owner", ""),
    ),
    mutation(
        DRAFTS,
        "test_the_scheduler_learns_lengths",
        "hardly any drafts",
        Edit(RUNNING_BATCH, "self.most = self.most - missed", "pass"),
    ),
    mutation(
        DRAFTS,
        "test_drafts_fall_away_before_a_request_does",
        "retracted for drafts",
        Edit(SCHEDULER, "running.plan_drafts(0)", "pass"),
    ),
    mutation(
        DRAFTS,
        "test_forced_tokens_are_drafts_with_masks_of_their_own",
        "other masks than drafts",
        Edit(DELAYED_SAMPLE, "req.num_delayed += 1", "pass"),
    ),
    mutation(
        DRAFTS,
        "test_forced_tokens_are_drafts_with_masks_of_their_own",
        "the constraint doesn.t allow",
        Edit(DELAYED_SAMPLE, "if req.constraint.is_terminated:", "if False:"),
    ),
    mutation(
        DRAFTS,
        "test_masks_behind_drafts_change_no_state",
        "the state has changed",
        Edit(GRAMMAR, "self._matcher.rollback(consumed)", "True"),
    ),
    mutation(
        DRAFTS,
        "test_masks_behind_drafts_change_no_state",
        "a token that is allowed",
        Edit(GRAMMAR, "self._mask = first", "pass"),
    ),
    mutation(
        DRAFTS,
        "test_forced_tokens_say_nothing_of_the_drafter",
        "judged by a grammar",
        Edit("engine/scheduler/draft_length.py", "if step.forced:", "if False:"),
    ),
    mutation(
        DRAFTS,
        "test_penalties_count_drafts_before_a_token_and_later_only_what_was_kept",
        "counts what was not kept",
        Edit(PENALTIES, "if kept is not None:", "if False:"),
    ),
    mutation(
        DRAFTS,
        "test_penalties_count_drafts_before_a_token_and_later_only_what_was_kept",
        "doesn't see the drafts",
        Edit(
            "engine/sampling/sampler.py",
            "SampledLines(rows, seq_lens, check)",
            "SampledLines(rows, seq_lens)",
        ),
    ),
    mutation(
        DRAFTS,
        "test_penalties_count_drafts_before_a_token_and_later_only_what_was_kept",
        "counts what was not kept",
        Edit("engine/sampling/draft_check.py", "num_kept[self.lines]", "num_kept[self.lines] + 9"),
    ),
    # Layers with windows
    mutation(
        WINDOWS,
        "test_a_page_that_was_left_is_taken_when_none_is_free",
        "assert 2 == 4",
        Edit("engine/kvcache/window_pages.py", "self._leave(table[", "0 and self._leave(table["),
    ),
    mutation(
        WINDOWS,
        "test_a_page_that_was_left_is_taken_when_none_is_free",
        "assert 3 == 0",
        Edit("engine/kvcache/window_pages.py", "if not dead.any():", "if True:"),
    ),
    # Graphs of decode steps
    *(
        mutation(
            GRAPHS,
            "test_a_delayed_sample_survives_another_forward",
            "same_results",
            Edit("engine/worker/tp_worker.py", f"{name} = {name}.clone()", "pass"),
        )
        for name in ("logits", "forward.sample_rows", "forward.sample_lens")
    ),
    # A row, and a KV slot, that the test never hands out.
    mutation(
        GRAPHS,
        "test_only_own_memory_changes",
        "<=",
        Edit(
            SIZES,
            "batch.req_pool_indices, counts), size, 0)",
            "batch.req_pool_indices, counts), size, 11)",
        ),
    ),
    mutation(
        GRAPHS,
        "test_only_own_memory_changes",
        "<=",
        Edit(
            SIZES,
            "_padded(batch.out_cache_loc, size, 0)",
            "_padded(batch.out_cache_loc, size, 576)",
        ),
    ),
    # Recorded decodes
    *(
        mutation(
            RECORDED, "test_tokens_are_the_same", "same", Edit(RECORDED_DECODES, guard, "pass")
        )
        for guard in (
            "self.hidden.copy_(hidden)",
            "mine.positions.copy_(batch.positions)",
            "mine.out_cache_loc.copy_(batch.out_cache_loc)",
            "mine.req_pool_indices_cpu[:] = batch.req_pool_indices_cpu",
            "mine.seq_lens_cpu[:] = batch.seq_lens_cpu",
        )
    ),
    mutation(
        RECORDED,
        "test_layers_with_windows_have_their_own_places",
        "same",
        Edit(
            RECORDED_DECODES,
            "mine.window_loc.copy_(backend.inputs.pool.window_slots(mine.out_cache_loc))",
            "pass",
        ),
    ),
    mutation(
        RECORDED,
        "test_another_kv_cache",
        "same",
        Edit(RECORDED_DECODES, "backend is not self._backend", "self._backend is None"),
    ),
    mutation(
        RECORDED,
        "test_layers_that_use_torch_run_as_they_are",
        "same",
        Edit(RECORDED_DECODES, "if calls.others:", "if False:"),
    ),
    # Adapters
    mutation(
        ADAPTERS,
        "test_no_adapter_waits_for_ever",
        "waits for ever",
        Edit(ADAPTER_TABLE, " and not entry.is_over", ""),
        raises=pytest.fail.Exception,
    ),
    mutation(
        ADAPTERS,
        "test_a_prefix_is_one_adapters",
        "assert",
        Edit(ADAPTER_REF, "{self.digest}\\n{inner}", "{self.name}\\n{inner}"),
    ),
    mutation(
        ADAPTERS,
        "test_the_least_recently_used_leaves_memory",
        "digest",
        Edit(ADAPTER_TABLE, "if len(held) < self._max_held:", "if True:"),
    ),
    mutation(
        ADAPTERS,
        "test_those_behind_go_on",
        "digest0",
        Edit(PLANNER, "if adapters is not None and not adapters.is_empty:", "if False:"),
    ),
    mutation(
        ADAPTERS,
        "test_embeddings_take_turns",
        "waits for ever",
        Edit(ADAPTER_TABLE, "entry.released += max(_num_new(req), 1)", "pass"),
        raises=pytest.fail.Exception,
    ),
    mutation(
        ADAPTERS,
        "test_long_answers_take_turns",
        "assert",
        Edit(
            ADAPTER_TABLE,
            "asked.sort(key=lambda entry: entry.since)",
            "asked.sort(key=lambda entry: -entry.since)",
        ),
    ),
    mutation(
        ADAPTERS,
        "test_a_long_answer_gives_its_slot_to_a_new_request",
        "assert",
        Edit(ADAPTER_TABLE, "if _may_leave(req)", "if False"),
    ),
    mutation(
        RECORDED,
        "test_adapters_of_experts_run_as_they_are",
        "assert",
        Edit(
            RECORDED_DECODES,
            "batch.adapters is not None and batch.adapters.changes_experts",
            "False",
        ),
    ),
    # Flex requests
    mutation(
        FLEX,
        "test_interactive_requests_come_first",
        "assert",
        Edit(REQUESTS, "return self.ranks[req.is_flex]", "return self.interactive"),
        Edit(
            "engine/scheduler/scheduler.py",
            "self.requests.ranks[request.sequence.is_flex]",
            "self.requests.interactive",
        ),
    ),
    mutation(
        FLEX,
        "test_a_row_stays_free_for_interactive_requests",
        "assert",
        Edit(PLANNER, "slots -= self._reserved_rows", "pass"),
    ),
    mutation(
        FLEX,
        "test_no_interactive_request_waits_for_what_flex_requests_hold",
        "assert",
        Edit(PLANNER, "return not round_.rank.is_flex and", "return False and"),
    ),
    mutation(
        FLEX,
        "test_no_interactive_request_waits_for_what_flex_requests_hold",
        "assert",
        Edit(
            PLANNER,
            "            if self.take_from_flex(",
            "            if 0 and self.take_from_flex(",
        ),
    ),
    mutation(
        FLEX,
        "test_flex_requests_evict_nothing_of_the_protected_half",
        "assert",
        Edit(
            "engine/scheduler/kv_manager.py",
            "        return self.room - protected\n",
            "        return self.room\n",
        ),
    ),
    mutation(
        FLEX,
        "test_a_long_flex_prompt_holds_up_no_small_ones",
        "no end in sight|assert",
        Edit(PLANNER, "elif added is AddResult.NO_TOKEN and rank.is_flex:", "elif False:"),
    ),
    mutation(
        FLEX,
        "test_a_long_flex_prompt_runs_in_the_end",
        "no end in sight|assert",
        Edit(
            PLANNER,
            "added = adder.add(req, force=alone, whole=beside, borrows=borrows)",
            "added = adder.add(req, force=alone, whole=beside)",
        ),
    ),
    mutation(
        FLEX,
        "test_a_long_flex_prompt_runs_in_the_end",
        "no end in sight|assert",
        Edit(PLANNER, " and self._will_have_room(round_):", " and False:"),
    ),
    mutation(
        FLEX,
        "test_a_long_flex_prompt_runs_in_the_end",
        "no end in sight|assert",
        Edit(SCHEDULER, " or is_alone or kv.borrower is not None:", " or is_alone:"),
    ),
    mutation(
        FLEX,
        "test_a_flex_prompt_that_interactive_requests_find_in_chunks_comes_to_its_end",
        "no end in sight|assert",
        Edit(
            PLANNER, "if self._kv.borrower is None and _has_waited_long(round_, req):", "if False:"
        ),
    ),
    mutation(
        FLEX,
        "test_what_flex_requests_left_is_evicted_first",
        "assert",
        Edit("engine/kvcache/eviction.py", "(not node.is_flex, ", "(False, "),
    ),
    mutation(
        FLEX,
        "test_what_an_interactive_request_used_is_no_longer_flex",
        "assert",
        Edit("engine/kvcache/radix_cache.py", "if child.is_flex and not is_flex:", "if False:"),
    ),
    mutation(
        FLEX,
        "test_flex_rows_pause_beside_interactive_ones",
        "assert",
        Edit(SCHEDULER, "if len(flex) > most:", "if False:"),
    ),
    mutation(
        FLEX,
        "test_an_interactive_request_is_not_retracted_for_flex_ones",
        "assert",
        Edit(
            "engine/scheduler/victims.py",
            "candidates = [r for r in own if r.is_flex] or",
            "candidates = [] and",
        ),
    ),
    mutation(
        FLEX,
        "test_what_flex_requests_use_gets_no_younger",
        "assert",
        Edit("engine/kvcache/radix_cache.py", "if child.is_flex or not is_flex:", "if True:"),
    ),
    mutation(
        BATCHES,
        "test_a_line_that_two_processes_answered_is_there_once",
        "assert",
        Edit(LINES, "if self.has(answer.number):", "if False:"),
    ),
    mutation(
        BATCHES,
        "test_the_output_is_a_function_of_the_file",
        "assert",
        Edit("deploy/http/generation/generation.py", "if self.is_line:", "if False:"),
    ),
    mutation(
        BATCHES,
        "test_another_model_waits",
        "assert",
        Edit(
            "deploy/http/batches/driver.py",
            "if client is None or client.model_info.digest != self._asked.digest:",
            "if client is None:",
        ),
        Edit(
            "deploy/http/generation/endpoint.py",
            "if (again.record.digest, again.record.adapter) != (digest, adapter):",
            "if False:",
        ),
    ),
    mutation(
        BATCHES,
        "test_a_batch_whose_parts_are_gone_stays_as_it_ended",
        "assert",
        Edit(
            "deploy/http/batches/driver.py",
            'if self._batch["status"] in END_STATUSES:',
            "if False:",
        ),
    ),
]
