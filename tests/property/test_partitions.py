"""However members come and go: soon each partition has one owner, shares are equal, and nothing moves needlessly."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.partition import PartitionOwners, decide_assigned

MEMBERS = [UUID(int=n) for n in range(1, 7)]


@given(
    count=st.integers(1, 16),
    members=st.lists(st.sampled_from(MEMBERS), min_size=1, unique=True),
    owned=st.dictionaries(st.integers(0, 15), st.sampled_from(MEMBERS)),
)
def test_after_two_rounds_everything_is_owned_in_equal_shares(count, members, owned):
    """One round: all give back what they do not want; then all take. Those who are gone lose theirs."""
    owners = {p: owner for p, owner in owned.items() if p < count and owner in members}
    before = dict(owners)
    for _ in range(2):
        wanted = {member: decide_assigned(PartitionOwners(count, members, owners), member) for member in members}
        taken = [p for member in members for p in wanted[member] if p not in owners]
        assert len(taken) == len(set(taken)), "two want one that is free"
        owners = {p: owner for p, owner in owners.items() if p in wanted[owner]}
        owners |= {p: member for member in members for p in wanted[member] if p not in owners}
    assert sorted(owners) == list(range(count))
    shares = [sum(owner == member for owner in owners.values()) for member in members]
    assert max(shares) - min(shares) <= 1
    for member, share in zip(members, shares, strict=True):
        kept = sum(before.get(p) == member and owners[p] == member for p in range(count))
        assert kept == min(share, sum(owner == member for owner in before.values())), "moved needlessly"
