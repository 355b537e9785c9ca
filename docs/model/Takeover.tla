------------------------------ MODULE Takeover -----------------------------
(***************************************************************************)
(* How long a frozen owner keeps its standby waiting: the times that Fence *)
(* leaves out.  A tick is a second of the database's clock; the numbers in *)
(* Takeover.cfg are those of the default lease.  One owner, which may      *)
(* freeze anywhere, and one standby.                                       *)
(***************************************************************************)
EXTENDS Integers

CONSTANTS
  Lease,      \* delivery.leaseDuration
  Beat,       \* between two renewals: a third of it
  Idle,       \* idle_in_transaction_session_timeout: 0.8 of it (transaction.py)
  Statement,  \* how long the server may go on with a statement after the freeze
  Poll,       \* between two looks of a standby (lifecycle.py, STANDBY_POLL)
  LockWait,   \* lock_timeout of acquire_lease.sql
  Bound       \* a standby is owner so long after a freeze

VARIABLES
  left,       \* until the lease lapses; 0: it has
  beat,       \* until the next renewal is due
  tx,         \* the owner's transaction: "none", "open", "fenced" (told 1: the lease row is locked)
  statement,  \* until the statement under way ends; 0: none
  idle,       \* how long the transaction has been idle
  frozen,
  since,      \* the freeze
  standby,    \* "sleeps", "waits" for the lock, "owns"
  next        \* until its sleep or its wait ends

vars == <<left, beat, tx, statement, idle, frozen, since, standby, next>>

Init ==
  /\ left = Lease /\ beat = Beat /\ tx = "none" /\ statement = 0 /\ idle = 0
  /\ frozen = FALSE /\ since = 0 /\ standby = "sleeps" /\ next = Poll

(* The owner. While it is not frozen its heartbeat thread keeps the         *)
(* transaction from being idle.                                             *)
Awake == ~frozen /\ standby # "owns"

BeginOrEnd ==
  /\ Awake /\ statement = 0 /\ left > 0
  /\ tx' = IF tx = "none" THEN "open" ELSE "none"
  /\ UNCHANGED <<left, beat, statement, idle, frozen, since, standby, next>>

(* A statement of the handler, or the store: that one may wait for a lock.  *)
Run ==
  /\ Awake /\ tx # "none" /\ statement = 0 /\ left > 0
  /\ statement' \in 0..Statement
  /\ tx' \in {tx, "fenced"}
  /\ UNCHANGED <<left, beat, idle, frozen, since, standby, next>>

Renew ==
  /\ Awake /\ beat = 0 /\ beat' = Beat
  /\ left' = IF left > 0 THEN Lease ELSE 0
  /\ UNCHANGED <<tx, statement, idle, frozen, since, standby, next>>

Freeze ==
  /\ Awake /\ frozen' = TRUE /\ since' = 0
  /\ UNCHANGED <<left, beat, tx, statement, idle, standby, next>>

(* In time: it renews before the lease lapses. Later it is for Fence.       *)
Thaw ==
  /\ frozen /\ left > 0 /\ frozen' = FALSE /\ since' = 0 /\ beat' = 0 /\ idle' = 0
  /\ UNCHANGED <<left, tx, statement, standby, next>>

(* The server.                                                              *)
EndIdle ==
  /\ tx # "none" /\ idle >= Idle
  /\ tx' = "none" /\ idle' = 0
  /\ UNCHANGED <<left, beat, statement, frozen, since, standby, next>>

(* The standby: an unlocked look; if the lease has lapsed, FOR UPDATE.      *)
Look ==
  /\ standby = "sleeps" /\ next = 0
  /\ IF left > 0 THEN standby' = "sleeps" /\ next' = Poll ELSE standby' = "waits" /\ next' = LockWait
  /\ UNCHANGED <<left, beat, tx, statement, idle, frozen, since>>

TakeOver ==
  /\ standby = "waits" /\ tx # "fenced"
  /\ standby' = "owns" /\ next' = 0
  /\ UNCHANGED <<left, beat, tx, statement, idle, frozen, since>>

GiveUp ==
  /\ standby = "waits" /\ tx = "fenced" /\ next = 0
  /\ standby' = "sleeps" /\ next' = Poll
  /\ UNCHANGED <<left, beat, tx, statement, idle, frozen, since>>

(* Time goes on when nothing is due.                                        *)
Due ==
  \/ Awake /\ beat = 0
  \/ tx # "none" /\ idle >= Idle
  \/ standby # "owns" /\ next = 0
  \/ standby = "waits" /\ tx # "fenced"

Less(n) == IF n > 0 THEN n - 1 ELSE 0

Tick ==
  /\ standby # "owns" /\ ~Due
  /\ left' = Less(left) /\ beat' = Less(beat) /\ statement' = Less(statement) /\ next' = Less(next)
  /\ idle' = IF frozen /\ tx # "none" /\ statement = 0 THEN idle + 1 ELSE 0
  /\ since' = IF frozen THEN since + 1 ELSE 0
  /\ UNCHANGED <<tx, frozen, standby>>

Next == BeginOrEnd \/ Run \/ Renew \/ Freeze \/ Thaw \/ EndIdle \/ Look \/ TakeOver \/ GiveUp \/ Tick
Spec == Init /\ [][Next]_vars

TypeOK ==
  /\ left \in 0..Lease /\ beat \in 0..Beat /\ tx \in {"none", "open", "fenced"}
  /\ statement \in 0..Statement /\ idle \in 0..Idle /\ frozen \in BOOLEAN /\ since \in Nat
  /\ standby \in {"sleeps", "waits", "owns"} /\ next \in Nat

(* The lease of an owner that is not frozen does not lapse.                 *)
AwakeKeepsLease == Awake => left > 0

TakenOverInTime == frozen /\ standby # "owns" => since <= Bound

(* The model would be worth little if no takeover ever came.                *)
NeverTakenOver == standby # "owns"
=============================================================================
