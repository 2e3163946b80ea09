"""The breaks of `make mutants`: a line of the product, what it becomes, and the tests that must see
it. The random traces see most of what the scheduler may do wrong; a test is named where it is the
narrowest one that sees the break.
"""

from __future__ import annotations

import msgspec

TRACES = (
    "tests/properties/test_scheduler_traces.py::test_any_trace_gives_the_tokens_of_the_plain_engine"
)
CACHE = "tests/cache/test_cache_model.py"
ROOM = "tests/scheduling/test_room.py"
EXECUTOR = "tests/gpu/test_executor.py"
TWO_TOKENS = (
    "tests/gpu/test_traces.py::test_rows_beside_rejected_drafts_get_their_own_tokens_and_logprobs"
)
RELAY = "tests/gpu/step/test_future_map.py"
RESOLVE = "tests/gpu/step/test_resolve.py"
DETOKENIZER = "tests/actors/test_detokenizer.py"


class Mutant(msgspec.Struct, frozen=True):
    name: str
    file: str
    line: str  # stands once in the file
    broken: str
    test: str = TRACES  # a file or a test of it, as pytest takes it


MUTANTS = (
    Mutant(
        "a page one short",
        "aserve/scheduling/select.py",
        "state.num_pages(start + query_len))",
        "state.num_pages(start + query_len - 1))",
    ),
    Mutant(
        "a middle chunk that samples",
        "aserve/scheduling/select.py",
        "if is_whole and sequence.max_tokens else 0",
        "if sequence.max_tokens else 0",
    ),
    Mutant(
        "the last chunk's sample not counted in lead",
        "aserve/scheduling/select.py",
        "if sequence.num_sampling >= lead or",
        "if sum(f.samples and f.query_len == 1 for f in sequence.flights) >= lead or",
    ),
    Mutant(
        "a relay read that expects the iteration before",
        "aserve/scheduling/batch.py",
        "return sequence.relay_stamp if reads_relay else 0",
        "return sequence.relay_stamp - 1 if reads_relay else 0",
    ),
    Mutant(
        "a bound not corrected at commit",
        "aserve/scheduling/commit.py",
        "advance=flight.max_advance - flight.max_outputs + count)",
        "advance=flight.max_advance)",
    ),
    Mutant(
        "drafts trusted after a resync",
        "aserve/scheduling/recover.py",
        "sequence.relay_stamp = 0",
        "sequence.relay_stamp *= 1",
    ),
    Mutant(
        "only the failed step's rows initialised again",
        "aserve/scheduling/recover.py",
        "sequence.written_pages = 0",
        "sequence.written_pages *= sequence.row not in next(iter(state.steps.values())).rows",
    ),
    Mutant(
        "a Launch that names a held row",
        "aserve/scheduling/select.py",
        "return sequence.mask is None or not sequence.is_held",
        "return True",
    ),
    Mutant(
        "uncommitted pages entering the tree",
        "aserve/scheduling/commit.py",
        "num_pages = sequence.cacheable_len // page_size",
        "num_pages = sequence.tokens.num // page_size",
    ),
    Mutant(
        "a row's parameters not sent again on re-admission",
        "aserve/scheduling/batch.py",
        "return tuple(sequence.row_init() for sequence in sequences if not sequence.written_pages)",
        "return tuple(s.row_init() for s in sequences if not s.written_pages | s.num_outputs)",
    ),
    Mutant(
        "a page freed twice",
        "aserve/cache/kv_cache.py",
        "            allocation.num_released[group] = visible\n",
        "            allocation.num_released[group] = first\n",
        CACHE,
    ),
    Mutant(
        "a late result of a finished request counted for the row's new tenant",
        "aserve/scheduling/commit.py",
        "flight = rows.get(row)",
        "sequence = state.running.get(row)\n"
        "        flight = next(iter(sequence.flights), None) if sequence else None",
    ),
    Mutant(
        "a prefix hit that skips positions whose scores are wanted",
        "aserve/scheduling/request.py",
        "            return self.num_scored - 1\n",
        "            pass\n",
    ),
    Mutant(
        "a score given twice after a retraction",
        "aserve/scheduling/prompts.py",
        "_behind(scores, num_seen, of=num_tokens)",
        "_behind(scores, 0, of=num_tokens)",
        "tests/scheduling/test_prompts.py::"
        "test_after_a_retraction_a_prompt_is_scored_from_where_its_scores_end",
    ),
    Mutant(
        "an embedding of a sequence that has left",
        "aserve/scheduling/prompts.py",
        "        if not flight.is_dropped:\n            outputs.append(",
        "        if True:\n            outputs.append(",
    ),
    Mutant(
        "decodes in order of admission, not of who waited longest",
        "aserve/scheduling/select.py",
        '    decodes.sort(key=attrgetter("last_iteration"))\n',
        "",
        f"{ROOM}::test_the_row_that_waited_longest_decodes_first_so_that_none_starves",
    ),
    Mutant(
        "a prefill that leaves the other rows no page",
        "aserve/scheduling/budget.py",
        "state.cache.available(group) - max(0, total - mine)",
        "state.cache.available(group)",
        f"{ROOM}::test_a_prefill_leaves_the_other_rows_the_pages_of_their_next_step",
    ),
    Mutant(
        "ample room claimed where a row's next page is not there",
        "aserve/scheduling/budget.py",
        "return all(state.cache.available(group) >= most for group in groups)",
        "return all(state.cache.available(group) >= most // 4 for group in groups)",
        f"{ROOM}::test_a_prefill_leaves_the_other_rows_the_pages_of_their_next_step",
    ),
    Mutant(
        "pages of the step that is filled counted twice",
        "aserve/scheduling/select.py",
        "step_total = step_need(state, state.running.values())\n",
        "need = step_need(state, state.running.values())\n"
        "        step_total = tuple(2 * pages for pages in need)\n",
        f"{ROOM}::test_a_prefill_leaves_the_other_rows_the_pages_of_their_next_step",
    ),
    Mutant(
        "an admission that counts the prompt without its first token",
        "aserve/scheduling/budget.py",
        "sequence.remaining + state.spec.decode.max_tokens_per_step",
        "sequence.remaining",
        f"{ROOM}::test_a_prompt_waits_until_its_first_token_fits_too",
    ),
    Mutant(
        "only one group of suspects looked at",
        "aserve/scheduling/select.py",
        "    while state.retries and",
        "    if state.retries and",
        f"{ROOM}::test_a_half_whose_rows_have_all_left_is_passed_over_at_once",
    ),
    Mutant(
        "the latest row retracted, whatever its priority and outputs",
        "aserve/scheduling/finish.py",
        "(sequence.priority, -sequence.num_outputs, sequence.arrival)",
        "(sequence.arrival, 0, 0)",
    ),
    Mutant(
        "a cancel that loses the count that the client kept",
        "aserve/scheduling/finish.py",
        'kept = event.kept if event.reason == "stop" else None',
        "kept = None",
    ),
    Mutant(
        "the token inside a span given as the one after it",
        "aserve/scheduling/batch.py",
        "end = sequence.scheduled_len + flight.query_len",
        "end = sequence.scheduled_len + flight.query_len - 1",
    ),
    Mutant(
        "statistics that count cached tokens of running rows again",
        "aserve/scheduling/batch.py",
        "num_cached_tokens=sum(sequence.committed_len for sequence in admitted)",
        "num_cached_tokens=sum(flight.sequence.committed_len for flight in flights)",
    ),
    Mutant(
        "statistics that take a newcomer's last token for a decode",
        "aserve/scheduling/batch.py",
        "f.is_prefill or f.sequence.row in new_rows",
        "f.is_prefill",
    ),
    Mutant(
        "logprobs that go on behind the end of their tokens",
        "aserve/scheduling/commit.py",
        "_cut(logprobs[row], num_kept, of=count)",
        "logprobs[row]",
    ),
    Mutant(
        "logprobs of held rows lost",
        "aserve/scheduling/commit.py",
        "logprobs = {record.row: record for record in result.logprobs}",
        "records = result.logprobs if isinstance(result, StepResult) else ()\n"
        "    logprobs = {record.row: record for record in records}",
    ),
    Mutant(
        "a mask that failed waited for on and on",
        "aserve/scheduling/grammar_rows.py",
        '        finish(state, sequence, "error", error=ready.error)\n',
        "",
    ),
    Mutant(
        "a failed step's successors awaited, though they were dropped",
        "aserve/scheduling/recover.py",
        "    state.steps.clear()\n",
        "    state.steps.pop(min(state.steps, default=0), None)\n",
    ),
    Mutant(
        "a good result of a step that was dropped for an earlier one's failure",
        "aserve/scheduling/commit.py",
        "step = state.steps.pop(result.iteration, None)",
        "step = state.steps.pop(result.iteration)",
    ),
    Mutant(
        "a good Sample of a step that was dropped",
        "aserve/scheduling/commit.py",
        "flight = state.samples.pop((result.iteration, row), None)",
        "flight = state.samples.pop((result.iteration, row))",
    ),
    Mutant(
        "a second windowed group without page table entries",
        "aserve/scheduling/batch.py",
        "for group in range(len(state.spec.groups))",
        "for group in range(min(2, len(state.spec.groups)))",
    ),
    Mutant(
        "a late failure acted on after the resync",
        "aserve/scheduling/recover.py",
        "failed.iteration < state.resync_at",
        "failed.iteration < 0",
    ),
    Mutant(
        "a window that forgets its oldest position",
        "aserve/cache/layout.py",
        "kv_len - window + 1",
        "kv_len - window + 2",
        "tests/cache/test_layout.py",
    ),
    Mutant(
        "a row that goes on inserting behind a duplicate",
        "aserve/cache/kv_cache.py",
        "allocation.is_inserting = False",
        "allocation.is_inserting = True",
        CACHE,
    ),
    Mutant(
        "a prefix hit that sees a tombstone",
        "aserve/cache/kv_cache.py",
        "            usable = gap\n",
        "            usable -= gap < 0\n            break\n",
        CACHE,
    ),
    Mutant(
        "evictable pages that nobody may have",
        "aserve/cache/kv_cache.py",
        "return self._pools[group].num_free + self.num_cached(group)",
        "return self._pools[group].num_free",
        CACHE,
    ),
    Mutant(
        "a prefix evicted from its beginning",
        "aserve/cache/prefix_tree.py",
        "self.order.add(run.span(still_locked, run.locked_end)[::-1])",
        "self.order.add(run.span(still_locked, run.locked_end))",
        CACHE,
    ),
    Mutant(
        "two users of a prefix counted as one",
        "aserve/cache/prefix_tree.py",
        "run.users[end] = run.users.get(end, 0) + 1",
        "run.users[end] = 1",
        CACHE,
    ),
    Mutant(
        "a windowed page that is in use evicted",
        "aserve/cache/windowed_pages.py",
        "        self.order.remove(fresh)\n",
        "        self.order.remove(fresh[:0])\n",
        "tests/cache/test_eviction.py",  # the random model goes on for ever
    ),
    Mutant(
        "pages evicted in the order in which they came, not in which they were left",
        "aserve/cache/eviction.py",
        "valid: ArrayI32 = entries[self._places[entries] == places]",
        "valid: ArrayI32 = np.sort(entries[self._places[entries] == places])",
        "tests/cache/test_eviction.py",
    ),
    Mutant(
        "the padding page given out",
        "aserve/cache/pools.py",
        "range(num_pages - 1, 0, -1)",
        "range(num_pages - 1, -1, -1)",
        "tests/cache/test_pools.py",
    ),
    Mutant(
        "a page that may come back twice",
        "aserve/cache/pools.py",
        "            self._is_free[page] = 1\n",
        "            self._is_free[page] = 0\n",
        "tests/cache/test_pools.py",
    ),
    Mutant(
        "a namespace that is not part of the key",
        "aserve/cache/prefix_tree.py",
        "blake2b(namespace.encode(), digest_size=KEY_BYTES)",
        "blake2b(b'', digest_size=KEY_BYTES)",
        "tests/cache/test_keys.py",
    ),
    Mutant(
        "a page's key that does not name the pages before it",
        "aserve/cache/prefix_tree.py",
        "parent = blake2b(page_tokens, digest_size=KEY_BYTES, key=parent).digest()",
        "parent = blake2b(page_tokens, digest_size=KEY_BYTES, key=root).digest()",
        "tests/cache/test_keys.py",
    ),
    Mutant(
        "a row that comes back free and taken",
        "aserve/cache/pools.py",
        "        self._is_free[row] = 0\n",
        "        self._is_free[row] = 1\n",
        "tests/cache/test_pools.py",
    ),
    Mutant(
        "one page too many called shared",
        "aserve/cache/allocation.py",
        "if left[most - 1] == right[most - 1]:",
        "if left[0] == right[0]:",
        "tests/cache/test_allocation.py",
    ),
    Mutant(
        "a result read from a slot that was given back",
        "aserve/gpu/transfer/host_copy.py",
        "self._slot.words[: self._num_words].copy()",
        "self._slot.words[: self._num_words]",
        f"{EXECUTOR}::test_steps_complete_in_launch_order_with_the_plain_engines_tokens",
    ),
    Mutant(
        "a staging buffer reused before its event",
        "aserve/gpu/executor.py",
        "        self._staged.append(slot)\n",
        "        self._staging._free.put(slot)\n",
        f"{EXECUTOR}::test_buffers_are_reused_only_after_their_steps_event",
    ),
    Mutant(
        "held rows that outlive a resync",
        "aserve/gpu/executor.py",
        "        self._held_lens.clear()\n",
        "",
        f"{EXECUTOR}::test_a_row_that_was_held_before_a_failure_cannot_be_sampled_after_the_resync",
    ),
    Mutant(
        "a held row that may be sampled twice",
        "aserve/gpu/executor.py",
        "            del self._held_lens[int(row)]\n",
        "            pass\n",
        f"{EXECUTOR}::test_a_held_row_cannot_be_sampled_twice",
    ),
    Mutant(
        "a step that runs after one that failed",
        "aserve/gpu/executor.py",
        "        self._has_failed = True\n",
        "        self._has_failed = False\n",
        f"{EXECUTOR}::test_a_failed_step_fails_all_up_to_the_resync_and_the_next_is_good",
    ),
    Mutant(
        "a step that runs after an unsound one",
        "aserve/gpu/executor.py",
        "self._has_failed or self._invalid_at >= self._good_from",
        "self._has_failed",
        f"{EXECUTOR}::test_nan_logits_fail_their_step_and_name_the_row",
    ),
    Mutant(
        "a resync after which the unsound step still counts",
        "aserve/gpu/executor.py",
        "        self._good_from = iteration\n",
        "",
        f"{EXECUTOR}::test_nan_logits_fail_their_step_and_name_the_row",
    ),
    Mutant(
        "logits that nobody looks at",
        "aserve/gpu/step/results.py",
        "    if not is_valid.all():\n",
        "    if False:\n",
        f"{EXECUTOR}::test_nan_logits_fail_their_step_and_name_the_row",
    ),
    Mutant(
        "a rejected draft emitted",
        "aserve/gpu/step/results.py",
        "np.arange(layout.width) < counts[:, None]",
        "np.arange(layout.width) <= counts[:, None]",
        TWO_TOKENS,
    ),
    Mutant(
        "logprobs that begin where the row before ended its tokens, not its window",
        "aserve/gpu/step/results.py",
        "start += int(logits.windows[index])",
        "start += int(counts[index])",
        TWO_TOKENS,
    ),
    Mutant(
        "a stale relay read that passes the checks",
        "aserve/gpu/step/results.py",
        "(plan.expects != 0) & (stamps != plan.expects)",
        "(plan.expects != 0) & (stamps == 0)",
        f"{RELAY}::test_a_wrong_relay_read_fails_its_step",
    ),
    Mutant(
        "the former tenant's relay kept",
        "aserve/gpu/step/future_map.py",
        "        self.written_iter.index_fill_(0, rows, NEVER)\n",
        "        pass\n",
        f"{RELAY}::test_a_wrong_relay_read_fails_its_step",
    ),
    Mutant(
        "id 0 taken for a placeholder",
        "aserve/gpu/step/future_map.py",
        "torch.where(ids < 0, tokens, ids)",
        "torch.where(ids <= 0, tokens, ids)",
        f"{RELAY}::test_ids_of_no_row_stand_for_themselves_whatever_padding_wrote_into_row_0",
    ),
    Mutant(
        "a relay that is read in place",
        "aserve/gpu/step/future_map.py",
        "    return table.index_select(0, rows)\n",
        "    return table[int(rows[0]) : int(rows[0]) + 1] if len(rows) == 1 else table[rows]\n",
        f"{RELAY}::test_what_was_read_does_not_change_with_the_next_stash",
    ),
    Mutant(
        "a stash without its stamp",
        "aserve/gpu/step/future_map.py",
        "    stamps.index_copy_(0, rows, iteration.expand(len(rows)))\n",
        "",
        f"{RELAY}::test_the_right_relay_read_is_no_failure",
    ),
    Mutant(
        "a bound taken for a length",
        "aserve/gpu/step/resolve.py",
        'torch.where(arrays.ints("is_bound") > 0, published, kv_lens)',
        'torch.where(arrays.ints("is_bound") > 1, published, kv_lens)',
        f"{RESOLVE}::test_each_kind_of_step_resolves_to_known_ids_at_their_positions",
    ),
    Mutant(
        "drafts one place too early",
        "aserve/gpu/step/resolve.py",
        "torch.where(numbers >= 0,",
        "torch.where(numbers >= -1,",
        f"{RESOLVE}::test_each_kind_of_step_resolves_to_known_ids_at_their_positions",
    ),
    Mutant(
        "a new tenant beside the former one's relay",
        "aserve/gpu/step/resolve.py",
        "        state.relay.forget(rows)\n",
        "",
        f"{RESOLVE}::test_a_new_tenant_finds_nothing_of_the_former_one",
    ),
    Mutant(
        "new pages that are not emptied",
        "aserve/gpu/step/resolve.py",
        "columns * state.pools.page_size >= kv_lens[rows]",
        "columns * state.pools.page_size > kv_lens[rows] + state.pools.page_size",
        f"{RESOLVE}::test_new_pages_are_emptied_and_pages_with_a_prefix_are_not",
    ),
    Mutant(
        "token ids that do not lie beside their KV",
        "aserve/gpu/step/resolve.py",
        "batch.slots[0], input_ids.to(torch.int32))",
        "batch.slots[0], input_ids.to(torch.int32) * 0)",
        f"{RESOLVE}::test_each_kind_of_step_resolves_to_known_ids_at_their_positions",
    ),
    Mutant(
        "lengths that a late failure takes back",
        "aserve/gpu/step/ticket.py",
        "        if not self._lens.first.done():\n            self._lens.settle(lens)\n",
        "        self._lens = _Shared(self._lens.first.get_loop())\n"
        "        self._lens.settle(lens)\n",
        "tests/gpu/step/test_ticket.py::test_lengths_that_were_published_survive_a_late_failure",
    ),
    Mutant(
        "only the first who awaits a ticket woken",
        "aserve/gpu/step/ticket.py",
        "for future in (self.first, *self._others):",
        "for future in (self.first, *self._others[:1]):",
        "tests/gpu/step/test_ticket.py",
    ),
    Mutant(
        "a stop string that counts tokens which the client does not get",
        "aserve/actors/detokenizer.py",
        "Cancel(request_id, index, child.text.num_kept, ",
        "Cancel(request_id, index, child.text.num_tokens, ",
        DETOKENIZER,
    ),
    Mutant(
        "a sequence cancelled that has retired",
        "aserve/actors/detokenizer.py",
        "child.text.stop is not None and not child.is_retired",
        "child.text.stop is not None",
        f"{DETOKENIZER}::test_a_sequence_that_already_retired_is_not_cancelled_for_its_stop_string",
    ),
    Mutant(
        "a request that ends with its first child",
        "aserve/actors/detokenizer.py",
        "all(each.is_finished for each in request.children)",
        "any(each.is_finished for each in request.children)",
        f"{DETOKENIZER}::test_only_the_last_child_to_end_ends_the_request",
    ),
    Mutant(
        "an end in the middle of a character that loses it",
        "aserve/actors/detokenizer.py",
        "        child.text.finish()\n",
        "",
        DETOKENIZER,
    ),
    Mutant(
        "a stop string lost behind a false start",
        "aserve/text/stop.py",
        "                matched = borders[matched - 1]\n",
        "                matched = 0\n",
        "tests/text/test_stop.py",
    ),
    Mutant(
        "the shorter of two stops that end together",
        "aserve/text/stop.py",
        "hit = hit or StopHit(stop, self._num_seen - len(stop))",
        "hit = StopHit(stop, self._num_seen - len(stop))",
        "tests/text/test_stop.py",
    ),
    Mutant(
        "a stop that counts before min_tokens",
        "aserve/text/output.py",
        "is_armed=self.num_tokens > self._min_tokens",
        "is_armed=self.num_tokens >= self._min_tokens",
        "tests/text/test_output.py::test_a_stop_counts_only_after_min_tokens",
    ),
    Mutant(
        "a token kept whose text begins at the cut",
        "aserve/text/output.py",
        "self._tokens[-1].start >= end",
        "self._tokens[-1].start > end",
        "tests/text/test_output.py",
    ),
    Mutant(
        "text given out that may become a stop",
        "aserve/text/output.py",
        "        return self.text_len - self._matcher.num_held\n",
        "        return self.text_len\n",
        "tests/text/test_output.py",
    ),
    Mutant(
        "an unfinished character that vanishes",
        "aserve/text/detokenize.py",
        'self._decode(b"", True)',
        'self._decode(b"", False)',
        "tests/text/test_detokenize.py",
    ),
    Mutant(
        "a character shown before its last token",
        "aserve/text/detokenize.py",
        "is_partial = not text or text.endswith(REPLACEMENT)",
        "is_partial = not text",
        "tests/text/test_detokenize.py",
    ),
    Mutant(
        "bodies without a bound of memory",
        "aserve/http/intake.py",
        "if size > SMALL_BYTES and self.held_bytes > self._max_held:",
        "if False:",
        "tests/http/test_intake.py::test_the_memory_of_bodies_is_bounded_and_small_ones_pass",
    ),
    Mutant(
        "memory of bodies that is not given back",
        "aserve/http/intake.py",
        "            self.held_bytes -= held.size\n",
        "            pass\n",
        "tests/http/test_intake.py::test_the_memory_of_bodies_is_bounded_and_small_ones_pass",
    ),
    Mutant(
        "a body that is decompressed to any size",
        "aserve/http/decompress.py",
        "MAX_RATIO = 100 ",
        "MAX_RATIO = 10_000 ",
        "tests/http/test_hostile.py",
    ),
    Mutant(
        "values counted in strings that go on in the next slice",
        "aserve/http/json_bounds.py",
        "            is_inside = ~is_inside\n",
        "            pass\n",
        "tests/http/test_json_bounds.py",
    ),
    Mutant(
        "a body whose values are not counted",
        "aserve/http/body.py",
        "            check_json_bounds(plain, max_values=intake.max_values)\n",
        "",
        "tests/http/test_hostile.py",
    ),
    Mutant(
        "a text that cannot fit and waits for a thread",
        "aserve/actors/tokenizer.py",
        "        self._encoder.check_size(request)\n",
        "",
        "tests/actors/test_tokenizer.py::test_a_text_that_does_not_fit_ends_with_one_message",
    ),
    Mutant(
        "the children of a request forgotten in the size of its answer",
        "aserve/http/openai/answer_size.py",
        "return sampling.n * min(most) * (1 + sampling.prompt_logprobs)",
        "return min(most) * (1 + sampling.prompt_logprobs)",
        "tests/http/test_answer_size.py",
    ),
    Mutant(
        "an unread answer that goes on",
        "aserve/request_stream.py",
        "            self.cancel()\n            self._on_unread()\n",
        "            self._on_unread()\n",
        "tests/http/test_unread.py",
    ),
    Mutant(
        "a client that reads nothing for ever",
        "aserve/http/delivery.py",
        "asyncio.timeout(timeout_s)",
        "asyncio.timeout(None)",
        "tests/http/test_unread.py",
    ),
    Mutant(
        "a conversation that grows without a bound",
        "aserve/http/responses/call.py",
        "range(len(earlier) + len(body.input))",
        "range(len(body.input))",
        "tests/http/responses/test_store.py",
    ),
    Mutant(
        "an exception of one request that ends the engine",
        "aserve/actors/scheduler.py",
        "self.attempt(event.request_id, consider, state, event)",
        "consider(state, event)",
        "tests/actors/test_one_request_fails.py",
    ),
)
