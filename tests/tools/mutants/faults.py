"""The table of known faults: what is planted, and which tests of `make test` must find it.

A fault is text that stands in a file exactly once, and what takes its place. Where that text is gone, `make mutants`
says so: then find where the same fault would be made now. Tests without a cluster are preferred: they are quick.
"""

from __future__ import annotations

from typing import Final

from tests.tools.mutants.broker_faults import BROKER
from tests.tools.mutants.fault import CORE, OPERATOR, SQL, WORKER, Edit, Fault, fault

_PAIR: Final = "(v_stored.last_processed_transaction_id, v_stored.last_processed_position)"
_HELD: Final = "AND l.epoch = p_epoch AND l.token = p_token AND l.expires_at > clock_timestamp();"
_TEST_CLOCK: Final = (
    "tests/contract/ownership/test_fence.py::test_expiry_is_judged_by_the_clock_and_not_by_the_transactions_start[18]"
)
_TEST_RELEASE: Final = "tests/unit/operator/watch/test_release.py"
_TEST_IDLE: Final = "tests/unit/operator/watch/test_idle.py"
_WRITE_STATUS: Final = """        if not await self.write_status(body, dump_status(decision.status)):
            return False
"""
_WRITE_EVENTS: Final = """        for event in decision.events:
            await self._events.write(processor, event)
"""

DATABASE: Final = (
    fault(
        "FOR KEY SHARE removed: a takeover does not wait for a commit",
        f"{SQL}/leases.sql",
        "    FOR KEY SHARE;\n    RETURN coalesce(\n",
        "    ;\n    RETURN coalesce(\n",
        "tests/contract/ownership/test_fence.py::test_no_takeover_between_store_and_commit[18]",
    ),
    fault(
        "positions compared alone when a checkpoint is stored",
        f"{SQL}/checkpoints.sql",
        f"    ELSIF {_PAIR}\n          = (p_expected_transaction_id, p_expected_position) AND v_range",
        "    ELSIF v_stored.last_processed_position = p_expected_position AND v_range",
        "tests/contract/checkpoints/test_checkpoint_steps.py::test_step",
    ),
    Fault(
        "now() for clock_timestamp() in the fence, before and behind its lock",
        (
            Edit(
                f"{SQL}/leases.sql",
                "l.token = p_owner_token AND l.expires_at > clock_timestamp();\n        IF NOT FOUND",
                "l.token = p_owner_token AND l.expires_at > now();\n        IF NOT FOUND",
            ),
            Edit(
                f"{SQL}/leases.sql",
                "v_lease.token = p_owner_token AND v_lease.expires_at > clock_timestamp(), false);",
                "v_lease.token = p_owner_token AND v_lease.expires_at > now(), false);",
            ),
        ),
        (_TEST_CLOCK,),
    ),
    fault(
        "now() for clock_timestamp() when a lease is asked for",
        f"{SQL}/leases.sql",
        "AND l.token <> p_token AND l.expires_at > clock_timestamp())",
        "AND l.token <> p_token AND l.expires_at > now())",
        _TEST_CLOCK,
    ),
    fault(
        "now() for clock_timestamp() in the heartbeat",
        f"{SQL}/leases.sql",
        f"    WHERE l.processor_id = p_processor_id AND l.partition = p_partition\n      {_HELD}\n    RETURN FOUND;",
        "    WHERE l.processor_id = p_processor_id AND l.partition = p_partition\n"
        f"      {_HELD.replace('clock_timestamp()', 'now()')}\n    RETURN FOUND;",
        _TEST_CLOCK,
    ),
    fault(
        "code 1 at step 7: what is stored further ahead is overwritten in the caller's mind",
        f"{SQL}/checkpoints.sql",
        "             >= (p_expected_transaction_id, p_expected_position) THEN\n        RETURN 2;  -- step 7",
        "             >= (p_expected_transaction_id, p_expected_position) THEN\n        RETURN 1;  -- step 7",
        "tests/contract/checkpoints/test_checkpoint_steps.py::test_step",
    ),
    fault(
        "the heartbeat renews without the token",
        f"{SQL}/leases.sql",
        f"    WHERE l.processor_id = p_processor_id AND l.partition = p_partition\n      {_HELD}\n    RETURN FOUND;",
        "    WHERE l.processor_id = p_processor_id AND l.partition = p_partition\n"
        f"      {_HELD.replace(' AND l.token = p_token', '')}\n    RETURN FOUND;",
        "tests/contract/ownership/test_ownership.py::TestLease::test_renewed_by_its_holder_only[18]",
    ),
    fault(
        "a batch is completed without its attempt",
        f"{SQL}/competing.sql",
        "    DELETE FROM competing_batches b\n    WHERE b.processor_id = p_processor_id AND b.id = p_batch "
        "AND b.owner = p_owner AND b.attempt = p_attempt\n      AND (b.upto",
        "    DELETE FROM competing_batches b\n    WHERE b.processor_id = p_processor_id AND b.id = p_batch "
        "AND b.owner = p_owner\n      AND (b.upto",
        "tests/contract/competing/test_competing.py::test_completion_failure_and_heartbeat_check_owner_and_attempt[18-attempt]",
    ),
    fault(
        "a consumer claims what it read ahead, also where another batch was handed out meanwhile",
        f"{WORKER}/postgres/reading/dispatch_reader.py",
        "if self._page is not None and self._page[0] == wanted:",
        "if self._page is not None:",
        "tests/contract/competing/test_competing_ahead.py::"
        "test_what_another_consumer_took_meanwhile_is_not_taken_again[18]",
    ),
    fault(
        "a claim lapses 30 s after it was made",
        f"{SQL}/claims.sql",
        "coalesce(p_claim.vacated_at < clock_timestamp()",
        "coalesce(coalesce(p_claim.vacated_at, p_claim.claimed_at) < clock_timestamp()",
        "tests/contract/ownership/test_ownership.py::TestClaim::test_it_never_lapses_while_its_resource_exists[18]",
    ),
    fault(
        "a lease is given during an open conflict",
        f"{SQL}/leases.sql",
        "AND f.needs_person AND f.resolved_at IS NULL)\n$function$;",
        "AND false)\n$function$;",
        "tests/contract/ownership/test_ownership.py::TestLease::test_refused_while_a_conflict_waits_for_a_person[18]",
    ),
    fault(
        "what refuses a lease is not asked again behind the locks",
        f"{SQL}/leases.sql",
        "            v_refused := refuses_lease(p_processor_id, p_partition, p_claim_uid, p_token);\n",
        "",
        "tests/contract/ownership/test_lock_order.py::"
        "test_no_lease_is_given_for_a_conflict_that_opens_while_it_is_waited_for[18]",
    ),
    fault(
        "a swap does not lock the claim against a lease that is being acquired",
        f"{SQL}/rebuilds.sql",
        "    PERFORM 1 FROM processor_claims c WHERE c.processor_id = p_processor_id FOR UPDATE;\n",
        "",
        "tests/contract/ownership/test_lock_order.py::"
        "test_a_partition_that_is_owned_for_the_first_time_during_a_swap_has_no_owner_after_it[18]",
    ),
    fault(
        "the hash is of another byte, in SQL",
        f"{SQL}/partitions.sql",
        "pg_catalog.convert_to(p_key, 'UTF8')), 0)",
        "pg_catalog.convert_to(p_key, 'UTF8')), 1)",
        "tests/contract/partitions/test_partitions.py::test_sql_hashes_as_python_does",
    ),
    fault(
        "keys are folded to lower case, in SQL",
        f"{SQL}/partitions.sql",
        "pg_catalog.convert_to(p_key, 'UTF8')",
        "pg_catalog.convert_to(pg_catalog.lower(p_key), 'UTF8')",
        "tests/contract/partitions/test_partitions.py::test_sql_hashes_as_python_does",
    ),
    fault(
        "a redriven dead letter loses its place",
        f"{SQL}/held_messages.sql",
        "coalesce(b.place, nextval('held_order'))",
        "nextval('held_order')",
        "tests/contract/test_held.py::test_dead_letters_that_are_redriven_the_later_one_first_keep_their_keys_order",
    ),
    fault(
        "a delayed message that becomes due overtakes what is held of its key",
        f"{SQL}/held_messages.sql",
        "CASE WHEN d.blocks THEN d.place ELSE nextval('held_order') END AS later",
        "d.place AS later",
        "tests/contract/test_held.py::test_what_becomes_due_waits_behind_all_that_is_held_of_its_key_by_then",
    ),
    fault(
        "migrations run without their lock",
        "sql/runner.py",
        '    connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))\n',
        "",
        "tests/migration/test_migrations.py::test_from_several_places_at_once_each_is_applied_once[18]",
    ),
)

READING: Final = (
    fault(
        "positions compared alone when the outbox is read",
        f"{WORKER}/postgres/reading/messages.py",
        '[sql.SQL("({}) > ({})").format(pair, AFTER)]',
        '[sql.SQL("o.position > {}::bigint").format(place("after_position"))]',
        "tests/contract/test_cursor.py::test_positions_that_commit_out_of_order_come_by_pair[18]",
    ),
    fault(
        "positions compared alone when Spark goes on",
        "worker/src/outbox_spark/streaming/resume.py",
        "    if directory.committed > stored:\n",
        "    if directory.committed.position > stored.position:\n",
        "tests/unit/engine/test_resume.py",
    ),
    fault(
        "Spark runs a planned batch in which transactions are open",
        "worker/src/outbox_spark/streaming/pipeline.py",
        "view is None or is_settled(connection, view.planned)",
        "True",
        "tests/integration/spark/test_spark_effects.py::test_a_planned_batch_is_run_again_once_the_server_has_settled_it",
    ),
    fault(
        "a role that row-level security hides messages from reads on",
        f"{WORKER}/postgres/schema.py",
        "faults = _hidden_rows(table, hidden_from)",
        "faults = []",
        "tests/integration/schema/test_schema_check.py::TestAMappedTable"
        "::test_a_role_that_policies_hide_rows_from_is_refused",
    ),
    fault(
        "the last message handled is stored instead of the last examined",
        f"{WORKER}/postgres/reading/messages.py",
        "            return replace(reach, messages=messages, matched_count=len(messages))\n",
        "            examined = messages[-1].checkpoint if messages else reach.examined\n"
        "            return replace(reach, messages=messages, matched_count=len(messages), examined=examined)\n",
        "tests/contract/test_cursor.py::TestFilters::test_examined_goes_beyond_what_matched",
    ),
    fault(
        "a snapshot range is read up to now",
        f"{WORKER}/postgres/reading/range_reader.py",
        "        span = SnapshotRange(snapshot_range.end, upper)\n",
        "        span = SnapshotRange(snapshot_range.end)\n",
        "tests/contract/test_snapshot_interleavings.py",
    ),
    fault(
        "a transaction that was open when a partition read in vain is not read later",
        f"{WORKER}/postgres/reading/arrivals.sql",
        "SELECT pg_snapshot_xmin(",
        "SELECT pg_snapshot_xmax(",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "the oldest transaction that was open when a partition read in vain is not read later",
        f"{WORKER}/postgres/reading/arrivals.py",
        "self.newest < before.bound",
        "self.newest <= before.bound",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "a snapshot range that was opened before is taken for one up to now",
        f"{WORKER}/postgres/reading/arrivals.py",
        "bound=min(before.bound, parse_snapshot(snapshot_range.end).xmin)",
        "bound=before.bound",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "a read in vain that ended at a barrier is taken for one up to now",
        f"{WORKER}/postgres/reading/arrivals.py",
        " or before.changes",
        "",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "messages are passed below which others may still be committed",
        f"{WORKER}/postgres/reading/arrivals.py",
        "self.newest is not None and self.newest < self.bound else None",
        "self.newest is not None else None",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "a look that did not name all messages is believed",
        f"{WORKER}/postgres/reading/arrivals.py",
        " or before.number < self._unbroken",
        "",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "what was seen before a crash of the server is believed after it",
        f"{WORKER}/postgres/reading/arrivals.py",
        "changed = self.run != before.run or ",
        "changed = ",
        "tests/contract/test_arrivals.py",
    ),
    fault(
        "the hash is of another byte, in Python",
        f"{CORE}/partition.py",
        ".digest()[0] % SLOTS",
        ".digest()[1] % SLOTS",
        "tests/unit/core/test_partition.py",
    ),
    fault(
        "keys are folded to lower case, in Python",
        f"{CORE}/partition.py",
        "hashlib.sha256(key.encode())",
        "hashlib.sha256(key.lower().encode())",
        "tests/unit/core/test_partition.py",
    ),
    fault(
        "null in deliver_after is the first day of year 1",
        f"{WORKER}/postgres/reading/table.py",
        "\"CASE WHEN {0} IS NOT NULL THEN least(greatest({0}, '0001-01-03Z'::timestamptz), '9999-12-30Z') END\"",
        "\"least(greatest({0}, '0001-01-03Z'::timestamptz), '9999-12-30Z')\"",
        "tests/integration/worker/targets/test_nulls.py::test_a_message_without_a_delay_is_not_delayed",
    ),
    fault(
        "null in deliver_after is a delay",
        f"{WORKER}/postgres/feeds/holding.sql",
        "coalesce(b.deliver_after > clock_timestamp(), false)",
        "coalesce(b.deliver_after > clock_timestamp(), true)",
        "tests/integration/worker/targets/test_nulls.py::test_messages_without_a_delay_are_not_held_beside_one_that_fails",
    ),
    fault(
        "a session of another run of the server than memory knows is trusted",
        f"{WORKER}/postgres/transactions/transaction.py",
        "        if self.server_run is not None and (row is None or row[-1] != self.server_run):\n",
        "        if False and (row is None or row[-1] != self.server_run):\n",
        "tests/integration/worker/test_crashed_backend.py::test_no_message_is_passed_by_a_batch_beyond_what_memory_knows",
    ),
)

OWNER: Final = (
    fault(
        "a replica that cannot load its handler keeps a share of the partitions",
        f"{WORKER}/ownership/renewal.py",
        "if not (held or self._membership.is_able):",
        "if False:",
        "tests/integration/worker/partitioned/test_unable_replica.py::"
        "test_a_replica_whose_handler_cannot_be_loaded_takes_no_share_until_it_can",
    ),
    fault(
        "what a receiver took before the server crashed counts for what comes at its place",
        "worker/src/outbox_core/message.py",
        "if self.message_id != self.pair:",
        "if True:",
        "tests/integration/worker/test_crashed_backend.py::"
        "test_what_a_receiver_took_of_a_lost_transaction_is_not_what_comes_at_its_place[direct]",
    ),
    fault(
        "code 2 commits",
        f"{WORKER}/postgres/transactions/transaction.py",
        "if request and answer is not StoreAnswer.STORED:",
        "if request and answer not in (StoreAnswer.STORED, StoreAnswer.AHEAD):",
        "tests/contract/test_feeds.py",
    ),
    fault(
        "AtLeastOnce hands over without a look at the lease",
        f"{WORKER}/engine/handling.py",
        "        if not under_way and (told := self._fresh.find_loss(state, batch)) is not None:\n"
        "            return told\n"
        "        if not self._effects.are_inside:",
        "        if not self._effects.are_inside:",
        "tests/integration/worker/test_ownership.py::test_frozen_between_fetch_and_hand_over_a_worker_hands_nothing_over",
    ),
    fault(
        "no idle timeout",
        f"{WORKER}/postgres/transactions/transaction.py",
        "idle=sql.Literal(str(idle_limit))",
        'idle=sql.Literal("0")',
        "tests/contract/ownership/test_fence.py::test_a_transaction_that_its_process_leaves_idle_is_ended_by_the_server_within_the_lease[18]",
    ),
    fault(
        "a lost COMMIT is taken for failed",
        f"{WORKER}/postgres/transactions/transaction.py",
        "        if is_unknown and request is not None:\n",
        "        if is_unknown and request is not None and not committing:\n",
        "tests/integration/worker/test_codes.py::test_a_commit_without_an_answer_is_adopted_and_no_conflict",
    ),
    fault(
        "a COMMIT behind which the statement was cancelled is taken for failed",
        f"{WORKER}/postgres/transactions/transaction.py",
        "committing = connection.closed or isinstance(error, TransientError)\n",
        "committing = connection.closed\n",
        "tests/contract/test_round_trips.py::test_what_ends_the_statement_behind_commit_leaves_it_unknown",
    ),
    fault(
        "what became of a lost COMMIT is not asked",
        f"{CORE}/processor/lifecycle.py",
        "    elif state.doubt is not None:\n        step = Step.CONFIRM\n",
        "",
        "tests/property/test_engine_in_memory.py",
    ),
    fault(
        "the circuit breaker's probe is a retry",
        f"{CORE}/processor/turns.py",
        " or breaker is not Phase.CLOSED",
        "",
        "tests/unit/core/processor/test_turns.py",
    ),
    fault(
        "Parquet is shown before its manifest commits",
        "worker/src/outbox_spark/streaming/pipeline.py",
        "        prepared.effects.apply(transaction, batch)\n",
        "        prepared.effects.apply(transaction, batch)\n"
        "        from outbox_spark.writing.files import reveal\n\n        reveal(prepared.effects.pending)\n",
        "tests/integration/spark/test_spark_driver.py::test_files_alone_over_a_commit_whose_answer_is_lost",
    ),
)

SECRETS: Final = (
    fault(
        "a database's URI is quoted in the error",
        f"{WORKER}/postgres/connection.py",
        "self._invalid(_NO_URI) from None",
        'self._invalid(f"{_NO_URI}: {uri}") from None',
        "tests/integration/test_connection.py",
    ),
    fault(
        "a broker's URI is quoted in the error",
        f"{WORKER}/targets/amqp/broker.py",
        'invalid_secret(f"`uri` is not a URI such as',
        'invalid_secret(f"`uri` {uri} is not a URI such as',
        "tests/unit/worker/test_broker.py",
    ),
    fault(
        "a broker's password is shown with its address",
        f"{WORKER}/targets/amqp/broker.py",
        "    password: str = field(repr=False)\n",
        "    password: str\n",
        "tests/unit/worker/test_broker.py",
    ),
)

CLUSTER: Final = (
    fault(
        "pods are scaled before the status says it",
        f"{OPERATOR}/reconcile/apply.py",
        _WRITE_STATUS + _WRITE_EVENTS,
        "        await self._apply_owned(body, observed, decision)\n" + _WRITE_STATUS + _WRITE_EVENTS,
        _TEST_IDLE,
    ),
    fault(
        "Events are written before the status",
        f"{OPERATOR}/reconcile/apply.py",
        _WRITE_STATUS + _WRITE_EVENTS,
        _WRITE_EVENTS + _WRITE_STATUS,
        _TEST_IDLE,
    ),
    fault(
        "a status is written although nothing changed",
        f"{OPERATOR}/reconcile/apply.py",
        '        if not is_news(body.get("status"), status):\n            return True\n',
        "",
        _TEST_IDLE,
    ),
    fault(
        "the claim of a deleted resource is given up beside pods that still work",
        f"{OPERATOR}/reconcile/release.py",
        "while pods := self._pods(job, _released_uid(job)):",
        "while pods := self._pods(job, _released_uid(job))[:0]:",
        _TEST_RELEASE,
    ),
    fault(
        "a pod that does not answer is scaled down",
        f"{OPERATOR}/decision/decide.py",
        "    replicas = 0 if result.stops_workers else wanted_replicas(observed)\n",
        "    silent = any(not pod.reachable for pod in observed.runners)\n"
        "    replicas = 0 if result.stops_workers or silent else wanted_replicas(observed)\n",
        "tests/unit/operator/decision/test_decide.py",
    ),
    fault(
        "a shared pod runs what is suspended until another one is ready",
        f"{OPERATOR}/rendering/shared.py",
        "    return not running <= wanted\n",
        "    return False\n",
        "tests/unit/operator/test_shared.py",
    ),
    fault(
        "a mark of ours that another client changed stays changed",
        f"{OPERATOR}/reconcile/apply.py",
        'if body is None or not all(_has(body, part, meta[part]) for part in ("labels", "annotations")):',
        "if body is None:",
        _TEST_IDLE,
    ),
    fault(
        "RBAC with a wildcard",
        "charts/outbox-operator/templates/_rules.tpl",
        "  resources: [secrets]\n  verbs: [create]\n",
        '  resources: [secrets]\n  verbs: ["*"]\n',
        "tests/chart/test_rbac.py",
    ),
)

FAULTS: Final = (*DATABASE, *READING, *OWNER, *BROKER, *SECRETS, *CLUSTER)
