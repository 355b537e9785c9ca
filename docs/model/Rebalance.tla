------------------------------ MODULE Rebalance -----------------------------
(***************************************************************************)
(* Changing the number of partitions: ask_partitions and change_partitions *)
(* (sql/functions) on one side, outbox_worker/engine/partition_steps.py on *)
(* the other.  That one store under one lease is atomic, and that a former *)
(* owner is refused, is what Fence shows; here it is one step.             *)
(*                                                                         *)
(* Transaction ids are numbers in the order in which they are taken.  Each *)
(* transaction writes one message of the key `id % 2`, or draws the barrier;  *)
(* they end in any order.  Partition p of n has the keys k with k % n = p. *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
  Workers,        \* processes, each with one lane at a time
  Last,           \* transaction ids that are taken
  Asks,           \* how often the resource is changed
  Acquires,       \* how often a lease is acquired
  \* What the change consists of. All TRUE, and Barrier = "own id", is what runs.
  Barrier,           \* just below the "own id" of the transaction that draws it; or at the "high-water mark" that it sees
  LooksAfter,     \* a reader looks for the barrier after it has read, not before
  NumberChecked,  \* whoever acquired a lease compares the number of partitions under it
  NumberLooked,   \* ... and looks at it with the barrier, after each reading
  LeasesEnded,    \* the change ends all leases
  AllAwaited      \* ... and waits for every partition

VARIABLES
  taken,   \* ids 1..taken are
  open,    \* of these, the transactions that have not ended
  drawing, \* the open one that draws a barrier: [id, barrier, to], or NoDrawing
  drew,    \* ids that wrote no message
  number,  \* processor_partitions: how many there are,
  next,    \* ... how many there shall be (0: as many),
  barrier,    \* ... and the stop barrier of that change
  cp,      \* processor_checkpoints, by partition
  lease,   \* processor_leases, by partition; rows stay
  me,      \* what each process remembers
  done,    \* ghost: how often each message was handled
  skipped, \* ghost: a message was handled before an earlier one of its key
  alarm,   \* ghost: a live owner found another checkpoint than its own, and a person was called
  asks, acquires

vars == <<taken, open, drawing, drew, number, next, barrier, cp, lease, me, done, skipped, alarm, asks, acquires>>
messages == <<taken, open, drawing, drew, asks>>
partitioning == <<number, next, barrier>>

Numbers == {1, 2}
Partitions == {0, 1}
None == -1
Nobody == "nobody"
NoDrawing == [id |-> 0, barrier |-> None, to |-> 0]
Min(a, b) == IF a < b THEN a ELSE b
HighWaterMark == IF open = {} THEN taken + 1 ELSE CHOOSE x \in open : \A y \in open : x <= y
Has(p, n, m) == (m % 2) % n = p /\ m \notin drew

NoMemory(n) == [at |-> "out", n |-> n, p |-> 0, epoch |-> 0, from |-> 0, to |-> 0, barrier |-> None]
Become(w, m) == me' = [me EXCEPT ![w] = m]
Out(w) == \E n \in Numbers : Become(w, NoMemory(n))

----------------------------------------------------------------------------
(* Producers, and the process that asks for another number.                *)

Take ==
  /\ taken < Last
  /\ taken' = taken + 1 /\ open' = open \cup {taken + 1}
  /\ UNCHANGED <<drawing, drew, asks, partitioning, cp, lease, me, done, skipped, alarm, acquires>>

End ==
  /\ \E id \in open \ {drawing.id} : open' = open \ {id}
  /\ UNCHANGED <<taken, drawing, drew, asks, partitioning, cp, lease, me, done, skipped, alarm, acquires>>

(* ask_partitions.sql: it takes an id, and its commit comes later.          *)
Draw ==
  /\ drawing = NoDrawing /\ next = 0 /\ asks < Asks /\ taken < Last
  /\ drawing' = [id   |-> taken + 1,
                 barrier |-> IF Barrier = "own id" THEN taken ELSE HighWaterMark - 1,
                 to   |-> 3 - number]
  /\ taken' = taken + 1 /\ open' = open \cup {taken + 1} /\ drew' = drew \cup {taken + 1} /\ asks' = asks + 1
  /\ UNCHANGED <<partitioning, cp, lease, me, done, skipped, alarm, acquires>>

Drawn ==
  /\ drawing # NoDrawing
  /\ next' = drawing.to /\ barrier' = drawing.barrier
  /\ open' = open \ {drawing.id} /\ drawing' = NoDrawing
  /\ UNCHANGED <<taken, drew, asks, number, cp, lease, me, done, skipped, alarm, acquires>>

(* The resource asks for the number there is: the change is taken back.     *)
TakeBack ==
  /\ next # 0 /\ asks < Asks /\ asks' = asks + 1
  /\ next' = 0 /\ barrier' = None
  /\ UNCHANGED <<taken, open, drawing, drew, number, cp, lease, me, done, skipped, alarm, acquires>>

----------------------------------------------------------------------------
(* A process, made for `n` partitions: perhaps not for as many as there are.*)

Owner(w) == lease[me[w].p].owner = w /\ lease[me[w].p].epoch = me[w].epoch

Acquire(w) ==
  /\ me[w].at = "out" /\ acquires < Acquires
  /\ \E p \in 0..(me[w].n - 1) :
       /\ lease[p].owner = Nobody
       /\ lease' = [lease EXCEPT ![p] = [epoch |-> @.epoch + 1, owner |-> w]]
       /\ Become(w, [NoMemory(me[w].n) EXCEPT !.at = "load", !.p = p, !.epoch = lease[p].epoch + 1])
  /\ acquires' = acquires + 1
  /\ UNCHANGED <<messages, partitioning, cp, done, skipped, alarm>>

(* begin_partitions.sql: under the lease. A number that differs: give it    *)
(* back, and begin anew.                                                    *)
Load(w) ==
  /\ me[w].at = "load"
  /\ IF ~Owner(w) THEN Out(w) /\ UNCHANGED lease
     ELSE IF (NumberChecked /\ number # me[w].n) \/ cp[me[w].p] = None
     THEN lease' = [lease EXCEPT ![me[w].p].owner = Nobody] /\ Become(w, NoMemory(number))
     ELSE Become(w, [me[w] EXCEPT !.at = "read", !.from = cp[me[w].p]]) /\ UNCHANGED lease
  /\ UNCHANGED <<messages, partitioning, cp, done, skipped, alarm, acquires>>

(* A batch of any size: below the bound, and not beyond the barrier it knows.  *)
Read(w) ==
  LET m == me[w]
      end == IF m.barrier = None THEN HighWaterMark - 1 ELSE Min(HighWaterMark - 1, m.barrier)
  IN
  /\ m.at = (IF LooksAfter THEN "read" ELSE "looked")
  /\ \E to \in (m.from + 1)..end : Become(w, [m EXCEPT !.at = IF LooksAfter THEN "look" ELSE "work", !.to = to])
  /\ UNCHANGED <<messages, partitioning, cp, lease, done, skipped, alarm, acquires>>

Look(w) ==
  LET m == me[w] IN
  /\ m.at = (IF LooksAfter THEN "look" ELSE "read")
  /\ IF NumberLooked /\ number # m.n
     THEN Become(w, [m EXCEPT !.at = "load"])       \* finds that it owns nothing any more
     ELSE IF ~LooksAfter THEN Become(w, [m EXCEPT !.at = "looked", !.barrier = barrier])
     ELSE IF barrier # None /\ m.to > barrier THEN Become(w, [m EXCEPT !.at = "read", !.barrier = barrier])
     ELSE Become(w, [m EXCEPT !.at = "work", !.barrier = barrier])
  /\ UNCHANGED <<messages, partitioning, cp, lease, done, skipped, alarm, acquires>>

(* It waits at the barrier it knows; it looks again now and then.              *)
Rest(w) ==
  LET m == me[w] IN
  /\ m.at \in {"read", "looked"} /\ m.barrier # None /\ m.from >= m.barrier /\ m.barrier # barrier
  /\ Become(w, [m EXCEPT !.at = "read", !.barrier = barrier])
  /\ UNCHANGED <<messages, partitioning, cp, lease, done, skipped, alarm, acquires>>

(* Effects and checkpoint, under the fence.                                 *)
Store(w) ==
  LET m == me[w]
      batch == {x \in (m.from + 1)..m.to : Has(m.p, m.n, x)}
  IN
  /\ m.at = "work"
  /\ IF Owner(w) /\ cp[m.p] = m.from
     THEN /\ cp' = [cp EXCEPT ![m.p] = m.to]
          /\ done' = [x \in 1..Last |-> IF x \in batch THEN done[x] + 1 ELSE done[x]]
          /\ skipped' = (skipped \/ \E x \in batch : \E y \in 1..(x - 1) :
                           y % 2 = x % 2 /\ y \notin drew /\ y \notin batch /\ done[y] = 0)
          /\ Become(w, [m EXCEPT !.at = "read", !.from = m.to])
     ELSE Out(w) /\ UNCHANGED <<cp, done, skipped>>
  /\ alarm' = (alarm \/ (Owner(w) /\ cp[m.p] # m.from))
  /\ UNCHANGED <<messages, partitioning, lease, acquires>>

(* change_partitions.sql, by any process.                                   *)
Arrived(p) == cp[p] >= barrier
Change ==
  /\ next # 0
  /\ IF AllAwaited THEN \A p \in 0..(number - 1) : Arrived(p) ELSE \E p \in 0..(number - 1) : Arrived(p)
  /\ number' = next /\ next' = 0 /\ barrier' = None
  /\ cp' = [p \in Partitions |-> IF p < next THEN barrier ELSE None]
  /\ lease' = IF LeasesEnded THEN [p \in Partitions |-> [lease[p] EXCEPT !.owner = Nobody]] ELSE lease
  /\ UNCHANGED <<messages, me, done, skipped, alarm, acquires>>

(* A lease lapses; its holder may be dead, or frozen and wake up later.     *)
Lapse ==
  /\ \E p \in Partitions : lease[p].owner # Nobody /\ lease' = [lease EXCEPT ![p].owner = Nobody]
  /\ UNCHANGED <<messages, partitioning, cp, me, done, skipped, alarm, acquires>>

(* SIGKILL; what starts in its place was perhaps given another number.      *)
Crash(w) ==
  /\ me[w].at # "out" /\ Out(w)
  /\ UNCHANGED <<messages, partitioning, cp, lease, done, skipped, alarm, acquires>>

----------------------------------------------------------------------------
Init ==
  /\ taken = 0 /\ open = {} /\ drawing = NoDrawing /\ drew = {} /\ asks = 0 /\ acquires = 0
  /\ number \in Numbers /\ next = 0 /\ barrier = None
  /\ cp = [p \in Partitions |-> IF p < number THEN 0 ELSE None]
  /\ lease = [p \in Partitions |-> [epoch |-> 0, owner |-> Nobody]]
  /\ me \in [Workers -> {NoMemory(n) : n \in Numbers}]
  /\ done = [x \in 1..Last |-> 0] /\ skipped = FALSE /\ alarm = FALSE

Next ==
  \/ Take \/ End \/ Draw \/ Drawn \/ TakeBack \/ Change \/ Lapse
  \/ \E w \in Workers : Acquire(w) \/ Load(w) \/ Read(w) \/ Look(w) \/ Rest(w) \/ Store(w) \/ Crash(w)

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* No message is handled under two numbers, or twice at all.                *)
ExactlyOnce == \A x \in 1..Last : done[x] <= 1

(* None is passed over: what lies behind a checkpoint was handled, and each *)
(* key in order, whatever the number was.                                   *)
NothingSkipped ==
  /\ ~skipped
  /\ \A p \in 0..(number - 1) : \A x \in 1..cp[p] : Has(p, number, x) => done[x] = 1

(* No change is taken for somebody who edits checkpoints.                   *)
NoFalseConflict == ~alarm

(* The barrier is where no reader has been yet.                               *)
NobodyBeyond == barrier # None => \A p \in 0..(number - 1) : cp[p] <= barrier

(* These shall fail: the model does come to what it is about.               *)
NeverChanged == ~(asks > 0 /\ next = 0 /\ barrier = None /\ \E x \in drew : \E w \in Workers :
                    me[w].at = "work" /\ me[w].from >= x)
NeverTwice == ~(asks = 2 /\ next # 0 /\ Cardinality(drew) = 2)
NeverStale == \A w \in Workers : ~(me[w].at = "work" /\ me[w].n # number)

Symmetry == Permutations(Workers)
=============================================================================
