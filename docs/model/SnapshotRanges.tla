--------------------------- MODULE SnapshotRanges --------------------------
(***************************************************************************)
(* Rebalance with the cursor Snapshot: the same change, but a checkpoint is *)
(* a range between two snapshots, and the barrier is a snapshot.             *)
(*                                                                         *)
(* Of two snapshots the later one sees all that the earlier one sees.  So  *)
(* a snapshot is a number here: how many transactions were over, in the    *)
(* order in which they ended.  Transaction m is the m-th to end; when it   *)
(* took its id does not matter.  It wrote one message of the key `m % 2`,  *)
(* or it asked for the change; a snapshot sees it if it is not below m.    *)
(* The order within a key is that in which its transactions ended, because *)
(* producers lock the key before they insert.                              *)
(*                                                                         *)
(* With `Crashes`, the server recovers from a crash, and a pooler hides it *)
(* from the processes: what was not flushed never was, and the next        *)
(* transactions to end get the numbers of those that are lost.  Nothing    *)
(* need wait for a flush, so this holds for `synchronous_commit = off`.    *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
  Workers,        \* processes, each with one lane at a time
  Last,           \* transactions that end
  Asks,           \* how often the resource is changed
  Acquires,       \* how often a lease is acquired
  Begun,          \* into how many partitions it may be partitioned at first
  \* What the change consists of. All TRUE, and Barrier = "after", is what runs.
  Barrier,           \* a snapshot "after" the asking commit; or the asking transaction's "own"
  LooksAfter,     \* a reader looks for the wish after it has taken its upper snapshot, not before
  Drops,          \* it drops a range that sees the wish's mark
  AllAwaited,     \* the change waits for every partition
  NumberChecked,  \* whoever acquired a lease compares the number of partitions under it
  LeasesEnded,    \* the change ends all leases
  \* A crash of the server, with nothing asked meanwhile.
  Crashes,        \* how often
  Runs,           \* a transaction that stores compares the server's run with the one that was loaded under
  Kept,           \* checkpoint and effects are in the same database, "here"; or in another server's, "apart"
  Flushed         \* apart: what a range sees is flushed in the source before the range is used

VARIABLES
  over,    \* how many transactions are: what a snapshot taken now sees
  asking,  \* the transaction that asks and has not committed: [own |-> its snapshot, to], or NotAsking
  asked,   \* transactions that wrote no message
  number,  \* processor_partitions: how many there are,
  next,    \* ... how many there shall be (0: as many),
  mark,    \* ... who asked for it,
  barrier,    \* ... and the stop barrier, None until it is drawn
  cp,      \* processor_checkpoints by partition: [seen, upper], see Range
  lease,   \* processor_leases, by partition; rows stay
  me,      \* what each process remembers
  done,    \* ghost: how often each message was handled
  skipped, \* ghost: a message was handled before an earlier one of its key
  alarm,   \* ghost: a live owner found another checkpoint than its own, and a person was called
  asks, acquires,
  void,    \* transactions that rolled back
  disk,    \* what a crash leaves
  crashes  \* the server's run

vars == <<void, disk, crashes, over, asking, asked, number, next, mark, barrier, cp, lease, me, done, skipped, alarm, asks, acquires>>
partitioning == <<number, next, mark, barrier>>
ghosts == <<done, skipped, alarm>>
durable == <<void, disk, crashes>>

Numbers == {1, 2}
Partitions == {0, 1}
None == -1
Nobody == "nobody"
NotAsking == [own |-> None, to |-> 0]
Has(p, n, m) == (m % 2) % n = p /\ m \notin asked \cup void

(* Examined up to `seen`; the range it is in ends at `upper`, which stays  *)
(* until the range is read. Between two ranges they are the same.         *)
Range(seen, upper) == [seen |-> seen, upper |-> upper]
Read0(n) == Range(n, n)
Gone == Read0(None)

NoMemory(n) == [at |-> "out", n |-> n, p |-> 0, epoch |-> 0, stored |-> Read0(0), from |-> Read0(0), to |-> Read0(0),
                barrier |-> None, run |-> 0]
Become(w, m) == me' = [me EXCEPT ![w] = m]
Out(w) == \E n \in Numbers : Become(w, NoMemory(n))

----------------------------------------------------------------------------
(* Producers, and the process that asks for another number.                *)

End ==
  /\ over < Last /\ over' = over + 1
  /\ UNCHANGED <<durable, asking, asked, asks, partitioning, cp, lease, me, ghosts, acquires>>

RollBack ==
  /\ Crashes > 0 /\ over < Last /\ over' = over + 1 /\ void' = void \cup {over + 1}
  /\ UNCHANGED <<disk, crashes, asking, asked, asks, partitioning, cp, lease, me, ghosts, acquires>>

(* ask_partitions.sql ... *)
Ask ==
  /\ asking = NotAsking /\ next = 0 /\ asks < Asks
  /\ asking' = [own |-> over, to |-> 3 - number] /\ asks' = asks + 1
  /\ UNCHANGED <<durable, over, asked, partitioning, cp, lease, me, ghosts, acquires>>

(* ... and its commit.                                                      *)
Asked ==
  /\ asking # NotAsking /\ over < Last
  /\ over' = over + 1 /\ asked' = asked \cup {over + 1}
  /\ next' = asking.to /\ mark' = over + 1 /\ barrier' = IF Barrier = "own" THEN asking.own ELSE None
  /\ asking' = NotAsking
  /\ UNCHANGED <<durable, asks, number, cp, lease, me, ghosts, acquires>>

(* draw_snapshot_barrier.sql, by any process.                                  *)
Draw ==
  /\ next # 0 /\ barrier = None /\ barrier' = over
  /\ UNCHANGED <<durable, over, asking, asked, asks, number, next, mark, cp, lease, me, ghosts, acquires>>

(* The resource asks for the number there is: the change is taken back.     *)
TakeBack ==
  /\ next # 0 /\ asks < Asks /\ asks' = asks + 1
  /\ next' = 0 /\ mark' = 0 /\ barrier' = None
  /\ UNCHANGED <<durable, over, asking, asked, number, cp, lease, me, ghosts, acquires>>

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
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, cp, ghosts>>

Load(w) ==
  /\ me[w].at = "load"
  /\ IF ~Owner(w) THEN Out(w) /\ UNCHANGED lease
     ELSE IF (NumberChecked /\ number # me[w].n) \/ cp[me[w].p] = Gone
     THEN lease' = [lease EXCEPT ![me[w].p].owner = Nobody] /\ Become(w, NoMemory(number))
     ELSE Become(w, [me[w] EXCEPT !.at = "read", !.stored = cp[me[w].p], !.from = cp[me[w].p],
                               !.run = crashes]) /\ UNCHANGED lease
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, cp, ghosts, acquires>>

(* What a crash leaves if it comes now: of another server's, what is there. *)
Source == [over |-> over, void |-> void, asked |-> asked]
Now == IF Kept = "apart" THEN Source
       ELSE Source @@ [number |-> number, cp |-> cp, lease |-> lease, done |-> done, skipped |-> skipped]

(* A page of the open range, or of a new one: up to the barrier it knows, or  *)
(* to now. Of any size.                                                     *)
Read(w) ==
  LET m == me[w]
      upper == IF m.from.seen < m.from.upper THEN m.from.upper ELSE IF m.barrier = None THEN over ELSE m.barrier
  IN
  /\ m.at = (IF LooksAfter THEN "read" ELSE "looked")
  /\ disk' = IF Crashes > 0 /\ Kept = "apart" /\ Flushed THEN Now ELSE disk  \* apart.py, read_durably
  /\ \E seen \in (m.from.seen + 1)..upper :
       Become(w, [m EXCEPT !.at = IF LooksAfter THEN "look" ELSE "work", !.to = Range(seen, upper)])
  /\ UNCHANGED <<void, crashes, over, asking, asked, asks, partitioning, cp, lease, ghosts, acquires>>

(* Is it beyond a barrier that may not be drawn yet? (barrier.py)            *)
Beyond(range) == next # 0 /\ range.upper >= mark /\ range.upper # barrier
Empty(m) == \A x \in (m.from.seen + 1)..m.to.seen : ~Has(m.p, m.n, x)

Look(w) ==
  LET m == me[w] IN
  /\ m.at = (IF LooksAfter THEN "look" ELSE "read")
  /\ IF number # m.n
     THEN Become(w, [m EXCEPT !.at = "load"])       \* finds that it owns nothing any more
     ELSE IF ~LooksAfter THEN Become(w, [m EXCEPT !.at = "looked", !.barrier = barrier])
     ELSE IF Drops /\ (Beyond(m.to) \/ (m.barrier # barrier /\ m.barrier # None))
     THEN Become(w, [m EXCEPT !.at = "read", !.barrier = barrier])
     ELSE \/ Become(w, [m EXCEPT !.at = "work", !.barrier = barrier])
          \/ /\ Empty(m) /\ m.to # Read0(barrier)      \* nothing to store: it moves on in memory only
             /\ Become(w, [m EXCEPT !.at = "read", !.barrier = barrier, !.from = m.to])
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, cp, lease, ghosts, acquires>>

(* It has nothing to read; it looks again now and then.                     *)
Rest(w) ==
  LET m == me[w] IN
  /\ m.at \in {"read", "looked"} /\ m.from.seen = m.from.upper /\ m.barrier # None /\ m.from.seen >= m.barrier
  /\ m.barrier # barrier \/ number # m.n
  /\ Become(w, IF number # m.n THEN [m EXCEPT !.at = "load"] ELSE [m EXCEPT !.at = "read", !.barrier = barrier])
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, cp, lease, ghosts, acquires>>

(* server_run.sql, in the BEGIN of transaction.py.                          *)
Lost(m) == Runs /\ Kept = "here" /\ m.run # crashes

(* Effects and checkpoint, under the fence; between batches what was stored *)
(* is compared, not what moved in memory.                                   *)
Store(w) ==
  LET m == me[w]
      batch == {x \in (m.from.seen + 1)..m.to.seen : Has(m.p, m.n, x)}
  IN
  /\ m.at = "work"
  /\ IF Lost(m)
     THEN Become(w, [m EXCEPT !.at = "load"]) /\ UNCHANGED <<cp, done, skipped>>
     ELSE IF Owner(w) /\ cp[m.p] = m.stored
     THEN /\ cp' = [cp EXCEPT ![m.p] = m.to]
          /\ done' = [x \in 1..Last |-> IF x \in batch THEN done[x] + 1 ELSE done[x]]
          /\ skipped' = (skipped \/ \E x \in batch : \E y \in 1..(x - 1) :
                           y % 2 = x % 2 /\ y \notin asked \cup void /\ y \notin batch /\ done[y] = 0)
          /\ Become(w, [m EXCEPT !.at = "read", !.stored = m.to, !.from = m.to])
     ELSE Out(w) /\ UNCHANGED <<cp, done, skipped>>
  /\ alarm' = (alarm \/ (~Lost(m) /\ Owner(w) /\ cp[m.p] # m.stored))
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, lease, acquires>>

(* change_partitions.sql, by any process.                                   *)
Change ==
  /\ next # 0 /\ barrier # None
  /\ IF AllAwaited THEN \A p \in 0..(number - 1) : cp[p] = Read0(barrier)
                   ELSE \E p \in 0..(number - 1) : cp[p] = Read0(barrier)
  /\ number' = next /\ next' = 0 /\ mark' = 0 /\ barrier' = None
  /\ cp' = [p \in Partitions |-> IF p < next THEN Read0(barrier) ELSE Gone]
  /\ lease' = IF LeasesEnded THEN [p \in Partitions |-> [lease[p] EXCEPT !.owner = Nobody]] ELSE lease
  /\ UNCHANGED <<durable, over, asking, asked, asks, me, ghosts, acquires>>

(* A lease lapses; its holder may be dead, or frozen and wake up later.     *)
Lapse ==
  /\ \E p \in Partitions : lease[p].owner # Nobody /\ lease' = [lease EXCEPT ![p].owner = Nobody]
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, cp, me, ghosts, acquires>>

(* SIGKILL; what starts in its place was perhaps given another number.      *)
Crash(w) ==
  /\ me[w].at # "out" /\ Out(w)
  /\ UNCHANGED <<durable, over, asking, asked, asks, partitioning, cp, lease, ghosts, acquires>>

----------------------------------------------------------------------------
(* The server writes its WAL to the disk, in the order in which things      *)
(* happened; nobody waits for it.                                           *)
Flush ==
  /\ crashes < Crashes /\ disk # Now /\ disk' = Now
  /\ UNCHANGED <<void, crashes, over, asking, asked, asks, partitioning, cp, lease, me, ghosts, acquires>>

(* A backend was killed. Processes remember what they did before.           *)
CrashServer ==
  /\ crashes < Crashes /\ next = 0 /\ crashes' = crashes + 1
  /\ over' = disk.over /\ void' = disk.void /\ asked' = disk.asked /\ asking' = NotAsking
  /\ IF Kept = "apart"
     THEN /\ done' = [x \in 1..Last |-> IF x > disk.over THEN 0 ELSE done[x]]
          /\ UNCHANGED <<number, cp, lease, skipped>>
     ELSE /\ number' = disk.number /\ cp' = disk.cp /\ lease' = disk.lease
          /\ done' = disk.done /\ skipped' = disk.skipped
  /\ UNCHANGED <<disk, asks, next, mark, barrier, me, alarm, acquires>>

----------------------------------------------------------------------------
Init ==
  /\ over = 0 /\ asking = NotAsking /\ asked = {} /\ asks = 0 /\ acquires = 0
  /\ number \in Begun /\ next = 0 /\ mark = 0 /\ barrier = None
  /\ cp = [p \in Partitions |-> IF p < number THEN Read0(0) ELSE Gone]
  /\ lease = [p \in Partitions |-> [epoch |-> 0, owner |-> Nobody]]
  /\ me \in [Workers -> {NoMemory(n) : n \in Numbers}]
  /\ done = [x \in 1..Last |-> 0] /\ skipped = FALSE /\ alarm = FALSE
  /\ void = {} /\ crashes = 0 /\ disk = Now

Next ==
  \/ Flush \/ CrashServer \/ RollBack
  \/ End \/ Ask \/ Asked \/ Draw \/ TakeBack \/ Change \/ Lapse
  \/ \E w \in Workers : Acquire(w) \/ Load(w) \/ Read(w) \/ Look(w) \/ Rest(w) \/ Store(w) \/ Crash(w)

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* No message is handled under two numbers, or twice at all.                *)
ExactlyOnce == \A x \in 1..Last : done[x] <= 1

(* None is passed over: what a checkpoint has examined was handled, and each*)
(* key in order, whatever the number was.                                   *)
NothingSkipped ==
  /\ ~skipped
  /\ \A p \in 0..(number - 1) : \A x \in 1..cp[p].seen :
       x <= over /\ Has(p, number, x) => done[x] = 1

(* No change is taken for somebody who edits checkpoints.                   *)
NoFalseConflict == ~alarm

(* The barrier holds every range that an owner has stored a page of.          *)
NobodyBeyond == barrier # None => \A p \in 0..(number - 1) : cp[p].upper <= barrier

(* These shall fail: the model does come to what it is about.               *)
NeverChanged == ~(asks > 0 /\ next = 0 /\ asked # {} /\ \E x \in asked : \E w \in Workers :
                    me[w].at = "work" /\ me[w].from.seen >= x)
NeverAtBarrierInMemory == ~(\E w \in Workers : me[w].at = "work" /\ me[w].to = Read0(barrier) /\ Empty(me[w])
                           /\ me[w].stored # me[w].from)
NeverInsideAtWish == ~(next # 0 /\ barrier = None /\ \E p \in 0..(number - 1) : cp[p].seen < cp[p].upper)

NeverAgain == ~(crashes > 0 /\ \E w \in Workers : me[w].at = "work" /\ me[w].run # crashes /\ me[w].from.seen > disk.over
                  /\ over >= me[w].from.seen)

Symmetry == Permutations(Workers)
=============================================================================
