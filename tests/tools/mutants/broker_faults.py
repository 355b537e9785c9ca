"""The known faults of targets that are brokers."""

from __future__ import annotations

from typing import Final

from tests.tools.mutants.fault import CORE, SQL, WORKER, fault

_UNDER_WAY: Final = "tests/integration/worker/targets/test_rabbitmq_under_way.py"
_KAFKA: Final = "tests/integration/worker/kafka/test_kafka_sink.py"
_STREAM: Final = "tests/integration/worker/targets/test_rabbitmq_stream.py"
_STREAM_SINK: Final = "tests/integration/worker/targets/test_rabbitmq_stream_sink.py"
_KAFKA_ONCE: Final = "tests/integration/worker/kafka/test_kafka_transaction_sink.py"
_KAFKA_TAKEOVER: Final = "tests/integration/worker/kafka/test_kafka_takeover.py"
_KAFKA_CRASHED: Final = "tests/integration/worker/kafka/test_kafka_crashed_server.py"
_ROUNDS: Final = f"{WORKER}/targets/librdkafka/rounds.py"

BROKER: Final = (
    fault(
        "the last batch that was begun is stored before those ahead of it",
        f"{CORE}/processor/lifecycle.py",
        "    if following and not state.blocking and following[0].after.is_same(pair):\n",
        "    following = following[-1:]\n    if following and not state.blocking:\n",
        "tests/unit/core/processor/test_following.py",
        f"{_UNDER_WAY}::test_so_many_are_published_and_no_more_before_the_oldest_is_stored",
    ),
    fault(
        "a worker that is asked to stop leaves batches that it began to others",
        f"{CORE}/processor/state.py",
        "(self.begun or self.step in (Step.STORE, Step.RECORD))",
        "self.step in (Step.STORE, Step.RECORD)",
        f"{_UNDER_WAY}::test_asked_to_stop_it_stores_what_is_under_way_and_begins_no_more",
    ),
    fault(
        "a batch that the target lost is believed under way, and those behind it are begun first",
        f"{WORKER}/engine/handling.py",
        "under_way = state.begun and self._effects.is_under_way(batch)\n",
        "under_way = state.begun\n",
        "tests/property/test_engine_in_memory.py",
        f"{_UNDER_WAY}::test_a_fault_at_one_partition_lets_no_message_of_another_one_be_overtaken",
    ),
    fault(
        "what the broker took behind a message that failed is forgotten",
        f"{WORKER}/targets/rabbitmq.py",
        "            self._taken.add(each.batch, accepted)\n",
        "            accepted.close()\n",
        f"{_UNDER_WAY}::test_a_message_that_no_queue_takes_is_named_and_the_others_come_once",
    ),
    fault(
        "a lone nack is taken for an ack",
        f"{WORKER}/targets/amqp/connection.py",
        "        if not accepted:\n",
        "        if not accepted and multiple:\n",
        "tests/unit/worker/test_confirm.py",
    ),
    fault(
        "which messages the broker refused is forgotten before it is written down",
        f"{WORKER}/targets/rabbitmq.py",
        "        for tag in (each for each in connection.confirms.nacked if each in attempt.tags):\n",
        "        refused = [each for each in connection.confirms.nacked if each in attempt.tags]\n"
        "        connection.confirms.forget_nacked(attempt.tags)\n"
        "        for tag in refused:\n",
        "tests/integration/worker/targets/test_rabbitmq_names.py::test_an_alarm_while_refusals_are_noted_loses_nothing",
    ),
    fault(
        "a frame begins within a heartbeat that is not sent yet",
        f"{WORKER}/targets/amqp/wire.py",
        "view = self._beat_frame[self._send(self._beat_frame) :]",
        "self._send(self._beat_frame)",
        "tests/unit/worker/targets/test_wire.py",
    ),
    fault(
        "every nack is taken for an ack",
        f"{WORKER}/targets/amqp/connection.py",
        "multiple=value.multiple, accepted=False)",
        "multiple=value.multiple, accepted=True)",
        "tests/integration/worker/targets/test_rabbitmq.py::test_a_refusal_by_the_broker_counts_as_attempt",
    ),
    fault(
        "every ack is taken for one of all before it",
        f"{WORKER}/targets/amqp/connection.py",
        "bool(bits & 1)",
        "bits is not None",
        "tests/unit/worker/test_confirm.py",
    ),
    fault(
        "what is laid out for one time is taken for messages without one",
        f"{WORKER}/targets/amqp/encoder.py",
        'data is None, stamp == "")',
        "data is None, False)",
        "tests/unit/worker/targets/test_amqp_encoder.py",
    ),
    fault(
        "what the broker returns is ignored",
        f"{WORKER}/targets/amqp/connection.py",
        '        self.returned.append(Returned(reply, method.exchange, method.routing_key or "", place))\n',
        "",
        "tests/integration/worker/targets/test_rabbitmq.py::test_a_message_that_no_queue_takes_names_exchange_and_key",
    ),
    fault(
        "a record that Kafka refuses counts as taken",
        _ROUNDS,
        "        self.others.add(message.checkpoint)\n",
        "        if not is_refusal(error):\n            self.others.add(message.checkpoint)\n",
        f"{_KAFKA}::TestRefusals::test_one_that_is_too_large_is_named_and_the_others_arrive_once",
    ),
    fault(
        "all records of a request that Kafka refuses are blamed",
        _ROUNDS,
        "for each in refused if together[each.topic, each.partition] == 1]",
        "for each in refused if together]",
        f"{_KAFKA}::TestRefusals::test_one_that_is_too_large_is_named_and_the_others_arrive_once",
    ),
    fault(
        "a record overtakes one of its key that Kafka refused",
        _ROUNDS,
        "            attempt.block(behind, message)",
        "            pass",
        f"{_KAFKA}::TestRefusals::test_each_key_keeps_its_order_and_waits_behind_what_failed",
    ),
    fault(
        "a round is sent before it is complete, and a refused record is overtaken",
        f"{WORKER}/targets/librdkafka/settings.py",
        '"linger.ms": 900_000',
        '"linger.ms": 1000',
        f"{_KAFKA}::TestRefusals::test_a_round_that_is_handed_over_slowly_keeps_the_order_of_a_key",
    ),
    fault(
        "of a round that an alarm ended all counts as taken",
        _ROUNDS,
        "except OutboxError:\n            are_all",
        "except BaseException:\n            are_all",
        f"{_KAFKA}::TestRefusals::test_an_alarm_that_ends_a_callback_loses_nothing",
    ),
    fault(
        "Kafka's answers are not awaited",
        f"{WORKER}/targets/librdkafka/producer.py",
        "        while before := self.waiting:\n",
        "        while before := 0:\n",
        f"{_KAFKA}::TestTheTargetsOwnFaults::test_a_broker_that_does_not_answer_is_given_up_in_time_and_nothing_is_lost",
    ),
    fault(
        "what Kafka confirmed before an attempt was given up is forgotten",
        _ROUNDS,
        "            are_all_answered = producer.give_up()\n",
        "            producer.give_up()\n",
        f"{_KAFKA}::TestTheTargetsOwnFaults"
        "::test_what_is_confirmed_before_the_broker_stops_answering_is_published_once",
    ),
    fault(
        "a stream is given no numbers",
        f"{WORKER}/targets/rabbitmq_stream.py",
        'own = "" if number is None or attempt.failed else attempt.reference',
        'own = ""',
        f"{_STREAM}::test_killed_between_confirm_and_checkpoint_the_stream_has_each_once",
    ),
    fault(
        "a number is sent before that of a message that failed",
        f"{WORKER}/targets/rabbitmq_stream.py",
        'own = "" if number is None or attempt.failed else',
        'own = "" if number is None else',
        f"{_STREAM_SINK}::test_a_message_that_failed_can_still_be_published",
    ),
    fault(
        "held messages behind one that fails again are settled and never sent",
        f"{WORKER}/targets/rabbitmq_stream.py",
        "self._stops and not batch.is_retried)",
        "self._stops)",
        f"{_STREAM_SINK}::test_held_messages_do_not_wait_for_one_that_fails_again",
    ),
    fault(
        "what an alarm kept from a stream counts as confirmed",
        f"{WORKER}/targets/rabbitmq_stream.py",
        "            connection.publish(publisher,",
        "            sent = {(publisher, number): each for (number, _), each in zip(entries, messages)}\n"
        "            attempt.unnumbered.update({} if reference else sent)\n"
        "            connection.publish(publisher,",
        f"{_STREAM_SINK}::test_what_an_alarm_kept_from_being_sent_does_not_count",
    ),
    fault(
        "a number is sent before that of a message that waits",
        f"{CORE}/progress/numbering.py",
        "first = min(batch.excluded, default=None)",
        "first = None",
        f"{_STREAM}::test_what_was_delayed_when_others_were_published_is_not_taken_for_published",
    ),
    fault(
        "other messages are given the same numbers",
        f"{CORE}/progress/numbering.py",
        'f"{source}\\n{partitioning}\\n{target}".encode()',
        'f"{target}".encode()',
        f"{_STREAM}::test_a_wider_filter_loses_nothing_of_what_was_published_before_the_kill",
    ),
    fault(
        "numbers go on from a checkpoint that they are not of",
        f"{SQL}/publisher_numbers.sql",
        'WHERE (n.place, n.mapping, n.transaction_id, n."position")\n'
        '                    = (excluded.place, excluded.mapping, excluded.transaction_id, excluded."position")',
        "WHERE (n.place, n.mapping) = (excluded.place, excluded.mapping)",
        "tests/contract/test_publisher_numbers.py::test_they_begin_anew_under_a_name_never_used",
    ),
    fault(
        "the number is not stored with its checkpoint",
        f"{WORKER}/postgres/progress/checkpoints.py",
        "CASE WHEN s.answer = {} THEN",
        "CASE WHEN s.answer <> {} THEN",
        f"{_STREAM}::test_killed_between_confirm_and_checkpoint_the_stream_has_each_once",
        "tests/contract/test_publisher_numbers.py::test_one_statement_stores_checkpoint_and_number_or_neither",
    ),
    fault(
        "a batch that follows another one is given no numbers",
        f"{WORKER}/engine/pipeline.py",
        "before = last.examined if self._effects.awaits_confirms else state.stored",
        "before = state.stored",
        f"{_STREAM}::test_killed_with_a_batch_behind_the_one_that_is_stored_each_is_there_once",
    ),
    fault(
        "a batch has numbers although the one before it may yet leave a message out",
        f"{WORKER}/engine/pipeline.py",
        "before = last.examined if self._effects.awaits_confirms else state.stored",
        "before = last.examined",
        "tests/property/test_engine_in_memory.py",
    ),
    fault(
        "a crash takes back messages that were read ahead and have numbers",
        f"{WORKER}/feeds/partition_reader.py",
        "durably=self._reads_durably)",
        "durably=False)",
        "tests/integration/worker/test_crashed_backend.py"
        "::test_a_message_that_a_stream_has_outlives_the_crash_also_where_it_was_read_ahead",
    ),
    fault(
        "the record of Kafka is read before former producers are shut out",
        f"{WORKER}/targets/librdkafka/transactional_sink.py",
        """            producer.shut_out(deadline)
            began = time.monotonic()
            topic = self._begin_reading(producer.settings, deadline)
            end = topic.find_end(unit.partition)
            # Behind the record is at most the mark of its commit, which brokers may owe (docs/adr/0030).
            is_known = last_offset is not None and last_offset < end <= last_offset + 2
            found = [] if is_known else topic.find(unit, end)
""",
        """            began = time.monotonic()
            topic = self._begin_reading(producer.settings, deadline)
            end = topic.find_end(unit.partition)
            # Behind the record is at most the mark of its commit, which brokers may owe (docs/adr/0030).
            is_known = last_offset is not None and last_offset < end <= last_offset + 2
            found = [] if is_known else topic.find(unit, end)
            producer.shut_out(deadline)
""",
        f"{_KAFKA_ONCE}::TestZombies::test_what_is_committed_just_before_it_is_shut_out_is_known",
    ),
    fault(
        "an owner begins with the producer that shut former ones out under an earlier lease",
        f"{WORKER}/targets/librdkafka/transactional_sink.py",
        "        if found is None or found.epoch != epoch:\n",
        "        if found is None:\n",
        f"{_KAFKA_TAKEOVER}::test_an_owner_of_another_epoch_begins_anew",
    ),
    fault(
        "a former owner with another producer does not look at the epoch of the record",
        f"{WORKER}/targets/librdkafka/transactional_sink.py",
        "        if publisher.last_epoch > epoch:\n",
        "        if False:\n",
        f"{_KAFKA_ONCE}::TestZombies::test_one_that_makes_another_producer_learns_of_the_later_owner",
    ),
    fault(
        "what a later owner wrote into the checkpoint topic is not looked at",
        f"{WORKER}/targets/librdkafka/transactional_sink.py",
        "is_known = last_offset is not None and last_offset < end <= last_offset + 2",
        "is_known = last_offset is not None",
        f"{_KAFKA_ONCE}::TestZombies::test_one_that_makes_another_producer_learns_of_the_later_owner",
    ),
    fault(
        "a transaction without an end stops its own producer",
        f"{WORKER}/targets/librdkafka/transactional_sink.py",
        "is_known = last_offset is not None and last_offset < end <= last_offset + 2",
        "is_known = False",
        f"{_KAFKA_ONCE}::TestATransactionWithoutAnEnd::test_a_producer_that_is_replaced_goes_on_behind_its_own_record",
    ),
    fault(
        "the record of a transaction names nothing",
        f"{WORKER}/targets/librdkafka/published.py",
        "str(batch.examined), tuple(names), held,",
        "str(batch.examined), (), held,",
        f"{_KAFKA_ONCE}::TestWhatTheNextOwnerKnows::test_what_is_published_and_not_stored_is_not_published_again",
    ),
    fault(
        "what was published before a rewind is not published again",
        f"{WORKER}/targets/librdkafka/published.py",
        "names = record.names if record.moved >= moved else ()",
        "names = record.names",
        f"{_KAFKA_ONCE}::TestWhatTheNextOwnerKnows::test_what_a_person_asks_for_again_is_published_again",
    ),
    fault(
        "of a batch that is stored in part the rest is forgotten",
        f"{WORKER}/targets/librdkafka/published.py",
        "fresh = self.unstored(batch.after) | ",
        "fresh = ",
        f"{_KAFKA_ONCE}::TestWhatTheNextOwnerKnows::test_of_a_batch_that_two_owners_died_of_nothing_is_forgotten",
        f"{_KAFKA_ONCE}::TestWhatTheNextOwnerKnows::test_with_cursor_snapshot_the_ranges_say_what_is_stored",
    ),
    fault(
        "a transaction of Kafka has messages that a crash of PostgreSQL may take back, or follows such a checkpoint",
        f"{WORKER}/engine/handling.py",
        "        if self._effects.are_remembered:  # with this batch",
        "        if False:  # with this batch",
        f"{_KAFKA_CRASHED}::test_batches_whose_checkpoints_a_crash_takes_back_are_not_published_again",
        f"{_KAFKA_CRASHED}::test_what_is_published_outlives_the_crash",
    ),
    fault(
        "an owner begins with Kafka from a checkpoint that a crash of PostgreSQL may take back",
        f"{WORKER}/engine/owner_steps.py",
        "        self._runner.flush_log(self._connection())  # what the target",
        "        # what the target",
        f"{_KAFKA_CRASHED}::test_a_checkpoint_by_which_an_owner_began_outlives_the_crash",
    ),
    fault(
        "the row is made before Kafka knows that older records are not about it",
        f"{WORKER}/engine/owner_steps.py",
        "begun_new = self._remembers and not",
        "begun_new = False and not",
        "tests/integration/worker/kafka/test_kafka_transactions.py"
        "::test_what_is_asked_for_again_by_deleting_the_row_comes_though_who_begins_dies_before_its_record",
    ),
    fault(
        "a message that is published, and passed as one to hold, is forgotten with its batch",
        f"{WORKER}/targets/librdkafka/transactional_sink.py",
        "                self._keep_excluded(start, publisher, batch, deadline)\n",
        "",
        f"{_KAFKA_ONCE}::TestWhatTheNextOwnerKnows"
        "::test_what_is_held_behind_one_that_stopped_its_partition_is_not_published_again",
    ),
)
