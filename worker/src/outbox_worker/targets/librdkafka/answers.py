"""PURE: what an answer of the brokers, or of librdkafka for them, means for a message and for the target."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.librdkafka.settings import LARGEST_MESSAGE

if TYPE_CHECKING:
    from outbox_worker.targets.librdkafka.settings import BrokerSettings

_REFUSED: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE: "it is too large; raise `max.message.bytes` of the topic, or make it smaller "
    f"(this target sends at most {LARGEST_MESSAGE} bytes)",
    KafkaError.RECORD_LIST_TOO_LARGE: "it is larger than a segment of the topic; raise `segment.bytes` of the topic, "
    "or make it smaller",
    KafkaError.INVALID_MSG_SIZE: "its size is not valid; make it smaller",
    KafkaError.INVALID_RECORD: "it is not valid there; a compacted topic takes no message without a key, for example",
    KafkaError.TOPIC_EXCEPTION: "the name of its topic is not valid; correct target.kafka.topic, or the row",
    KafkaError.POLICY_VIOLATION: "a policy of the brokers forbids it; ask who runs them",
}
"""The message's own fault. All messages of one request have this answer, though one alone may have caused it."""

_NOT_TRIED: Final = frozenset(
    {
        KafkaError._FATAL,
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._INVALID_DIFFERENT_RECORD,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    }
)
_LOGINS: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_FORBIDDEN: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_FENCED: Final = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_TXN_STATE}
)
_HINTS: Final = {
    KafkaError.INVALID_TIMESTAMP: "set the clock of the worker's node right, or see `message.timestamp.after.max.ms` "
    "and `message.timestamp.before.max.ms` of the topic; "
}
"""What to do where no message is to blame: the client takes the time of each from the clock."""
_PREPOSITIONS: Final = {"Write": " to"}
_IDEMPOTENT: Final = {"Write": ", which includes idempotent writes since Kafka 2.8"}
_TOPIC_MISSING: Final = frozenset(
    {
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._DESTROY,
    }
)
"""The last is how librdkafka answers for what it holds of a partition that the topic does not have any more."""

_LASTED: Final = re.compile(r" \(after \d+ms in state \w+(, \d+ identical error\(s\) suppressed)?\)")


def describe(error: KafkaError) -> str:
    """Return the client's words without how long it took: that differs each time, and a status would change with it."""
    return _LASTED.sub("", error.str())


def is_refusal(error: KafkaError) -> bool:
    """Say whether it may be the message's own fault."""
    return error.code() in _REFUSED


def is_not_tried(error: KafkaError) -> bool:
    """Say whether the message was given up for another's sake: it is sent again."""
    return error.code() in _NOT_TRIED


def is_settling(error: KafkaError) -> bool:
    """Say whether a topic may be there in a moment."""
    return error.code() in _TOPIC_MISSING or error.code() == KafkaError.LEADER_NOT_AVAILABLE


def is_login(error: KafkaError) -> bool:
    """Say whether no message can be sent before the Secret or the brokers' settings change."""
    code = error.code()
    return code in _LOGINS or code in _FORBIDDEN or code == KafkaError._SSL


def build_refusal(error: KafkaError, topic: str, place: object) -> HandlerError:
    """Say that the brokers do not take a message."""
    return HandlerError(
        f"topic {topic} does not take the message at {place}: {_REFUSED[error.code()]} ({error.name()})",
        reason=Reason.MESSAGE_REJECTED,
        classes=(error.name(),),
    )


def classify_error(
    error: KafkaError,
    settings: BrokerSettings,
    *,
    topic: str = "",
    operation: str = "Write",
    transaction: str = "",
) -> OutboxError:
    """Say what is wrong with the target, and what to do.

    `topic` is what it is about, if it is about one, `operation` what was to be done with that, and `transaction` the
    transactional id, where there is one.
    """
    code, said, user = error.code(), f"{error.name()}: {describe(error)}", settings.username
    kind: type[TransientError | ConfigurationError] = TransientError
    reason = Reason.TARGET_UNAVAILABLE
    if code in _LOGINS:
        reason = Reason.AUTHENTICATION_FAILED
        who = f"the login of user {user}" if user else "a connection without a login"
        what = (
            f" refuses {who} ({said}); correct `username`, `password` and `saslMechanism` in the target's Secret; "
            "it is tried again"
        )
    elif code in _FENCED:
        what = (
            f": another producer took over this one's transactional id ({said}); the lease is looked at, and it is "
            "tried again"
        )
    elif code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        kind, reason = ConfigurationError, Reason.PERMISSION_DENIED
        which = f"the transactional id {transaction}" if transaction else "its transactional id"
        prefix = transaction.rsplit("/", 2)[0] if transaction else "outbox/PROCESSOR_ID"
        what = (
            f" does not let user {user} use {which} ({said}); allow it the operations Write and Describe on "
            f"transactional ids with the prefix {prefix}/"
        )
    elif code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        kind, reason = ConfigurationError, Reason.INVALID_CONFIGURATION
        what = (
            f" does not allow transactions that last as long as delivery.timeout and 10 s more ({said}); lower "
            "delivery.timeout, or raise `transaction.max.timeout.ms` of the brokers"
        )
    elif code in _FORBIDDEN:
        kind, reason = ConfigurationError, Reason.PERMISSION_DENIED
        who, which = f"user {user}" if user else "a client without a login", f"topic {topic}" if topic else "a topic"
        what = (
            f" does not let {who} {operation.lower()}{_PREPOSITIONS.get(operation, '')} {which} ({said}); allow it the "
            f"operation {operation} on the topic{_IDEMPOTENT.get(operation, '')}"
        )
    elif code in _TOPIC_MISSING:
        reason = Reason.MESSAGE_UNROUTABLE
        what = (
            f" has no topic {topic} ({said}); create the topic, or correct target.kafka.topic; it is tried again until "
            "it is there"
        )
    elif code == KafkaError._SSL and "certificate verify failed" in said:
        kind, reason = ConfigurationError, Reason.CONNECTION_SECRET_INVALID
        what = f": its certificate is not trusted ({said}); put the right CA into `ca.crt` of the target's Secret"
    else:
        what = f" did not take the messages ({said}); {_HINTS.get(code, '')}they are tried again"
    return kind(f"Kafka at {settings.servers}{what}", reason=reason, classes=(error.name(),))
