------------------------------ MODULE Numbers ------------------------------
(***************************************************************************)
(* Numbers by which a receiver drops what it has, with two batches under   *)
(* way (outbox_core/progress/numbering.py, engine/pipeline.py,             *)
(* targets/rabbitmq_stream.py).  The receiver drops a message whose number *)
(* is not above the highest one that it has, and confirms it: so one that  *)
(* comes behind a higher number is lost.                                   *)
(*                                                                         *)
(* The first rule is taken for granted here: the number of a message is    *)
(* its place in the order, for every process.  The fence is Fence.tla's    *)
(* and one step, and a process that is frozen is one that does nothing for *)
(* long, as in Pipeline.tla.  What a process wrote is in its connection    *)
(* until the receiver takes it: also after that process died.              *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
  Workers,      \* processes of one resource
  Nobody,
  Last,         \* messages 1..Last are in the outbox
  Most,         \* batches under way (most_under_way)
  Faults,       \* how many connections break or processes die
  Epochs,       \* how often a lease is acquired
  Unfits,       \* how often a message is left out: it fails, is delayed, or waits behind one that failed
  \* What the protocol consists of. All TRUE is what runs.
  Bare,         \* behind a message that is left out none of its batch is sent with a number
  Whole         \* a batch is begun when all of the one before is confirmed, and none of it was left out

VARIABLES
  row,       \* the stored checkpoint: examined up to here
  held,      \* of that, what was left out: it is sent later, without a number
  lease,     \* its epoch and owner
  me,        \* what each process remembers
  wire,      \* what each process wrote and the receiver has not taken, in order
  high,      \* the receiver's highest number
  stream,    \* ghost: how often the receiver has each message, two being often
  faults, unfits

vars == <<row, held, lease, me, wire, high, stream, faults, unfits>>

Messages == 1..Last
Within(batch) == (batch.from + 1)..batch.to

(* `pair`: what the process believes stored. `begun`: batches that were   *)
(* begun and are not stored, in order. `heard`: messages confirmed to it.  *)
Out == [at |-> "out", epoch |-> 0, pair |-> 0, begun |-> <<>>, heard |-> {}]
End(w) == IF me[w].begun = <<>> THEN me[w].pair ELSE me[w].begun[Len(me[w].begun)].to
IsConfirmed(w, batch) == Within(batch) \ batch.out \subseteq me[w].heard

Become(w, m) == me' = [me EXCEPT ![w] = m]

(* Who held it may not know yet. A connection is made anew.                 *)
Acquire(w) ==
  /\ me[w].at = "out" /\ lease.epoch < Epochs /\ wire[w] = <<>>
  /\ lease' = [epoch |-> lease.epoch + 1, owner |-> w]
  /\ Become(w, [Out EXCEPT !.at = "owns", !.epoch = lease.epoch + 1, !.pair = row])
  /\ UNCHANGED <<row, held, wire, high, stream, faults, unfits>>

(* The lease is looked at, and then the batch is written: the look is a    *)
(* step of its own, because the process may be frozen after it.            *)
Look(w) ==
  /\ me[w].at = "owns" /\ Len(me[w].begun) < Most /\ End(w) < Last
  /\ Whole => \A n \in 1..Len(me[w].begun) :
                 me[w].begun[n].out = {} /\ IsConfirmed(w, me[w].begun[n])
  /\ Become(w, IF lease.owner = w /\ lease.epoch = me[w].epoch
               THEN [me[w] EXCEPT !.at = "writes"] ELSE Out)
  /\ UNCHANGED <<row, held, lease, wire, high, stream, faults, unfits>>

(* What is sent of a batch, with which numbers; 0 is none.                  *)
Frames(batch) ==
  LET Frame(m) == [message |-> m,
                   number |-> IF Bare /\ \E each \in batch.out : each < m THEN 0 ELSE m]
      IsSent(frame) == frame.message \notin batch.out
  IN SelectSeq([n \in 1..(batch.to - batch.from) |-> Frame(batch.from + n)], IsSent)

Begin(w) ==
  /\ me[w].at = "writes"
  /\ \E to \in (End(w) + 1)..Last, out \in SUBSET Messages :
       LET batch == [from |-> End(w), to |-> to, out |-> out]
       IN /\ out \subseteq Within(batch) /\ unfits + Cardinality(out) <= Unfits
          /\ Become(w, [me[w] EXCEPT !.at = "owns", !.begun = Append(@, batch)])
          /\ wire' = [wire EXCEPT ![w] = @ \o Frames(batch)]
          /\ unfits' = unfits + Cardinality(out)
  /\ UNCHANGED <<row, held, lease, high, stream, faults>>

(* The receiver takes or drops the next one, and confirms it.               *)
Take(w) ==
  /\ wire[w] # <<>>
  /\ LET frame == Head(wire[w])
         dropped == frame.number > 0 /\ frame.number <= high
     IN /\ stream' = [stream EXCEPT ![frame.message] = IF dropped \/ @ = 2 THEN @ ELSE @ + 1]
        /\ high' = IF frame.number > high THEN frame.number ELSE high
        /\ IF me[w].at = "out" THEN UNCHANGED me
           ELSE Become(w, [me[w] EXCEPT !.heard = @ \cup {frame.message}])
  /\ wire' = [wire EXCEPT ![w] = Tail(@)]
  /\ UNCHANGED <<row, held, lease, faults, unfits>>

(* The oldest batch under way; what of it was left out is held with it.     *)
Store(w) ==
  /\ me[w].at = "owns" /\ me[w].begun # <<>>
  /\ LET batch == Head(me[w].begun)
     IN /\ IsConfirmed(w, batch)
        /\ IF lease.owner = w /\ lease.epoch = me[w].epoch /\ row = me[w].pair
           THEN /\ row' = batch.to
                /\ held' = held \cup batch.out
                /\ Become(w, [me[w] EXCEPT !.pair = batch.to, !.begun = Tail(@)])
           ELSE Become(w, Out) /\ UNCHANGED <<row, held>>
  /\ UNCHANGED <<lease, wire, high, stream, faults, unfits>>

(* The connection breaks: nothing under way is believed, nor is it known   *)
(* what of it the receiver has.                                             *)
Break(w) ==
  /\ faults < Faults /\ faults' = faults + 1
  /\ me[w].at = "owns"
  /\ Become(w, [me[w] EXCEPT !.begun = <<>>, !.heard = {}])
  /\ wire' = [wire EXCEPT ![w] = <<>>]
  /\ UNCHANGED <<row, held, lease, high, stream, unfits>>

(* What a process wrote before it died may still come, or be lost.          *)
Die(w) ==
  /\ faults < Faults /\ faults' = faults + 1
  /\ me[w].at # "out"
  /\ Become(w, Out)
  /\ UNCHANGED <<row, held, lease, wire, high, stream, unfits>>

Lose(w) ==
  /\ me[w].at = "out" /\ wire[w] # <<>>
  /\ wire' = [wire EXCEPT ![w] = <<>>]
  /\ UNCHANGED <<row, held, lease, me, high, stream, faults, unfits>>

Init ==
  /\ row = 0 /\ held = {} /\ lease = [epoch |-> 0, owner |-> Nobody]
  /\ me = [w \in Workers |-> Out]
  /\ wire = [w \in Workers |-> <<>>]
  /\ high = 0 /\ stream = [m \in Messages |-> 0]
  /\ faults = 0 /\ unfits = 0

Next ==
  \E w \in Workers :
    Acquire(w) \/ Look(w) \/ Begin(w) \/ Take(w) \/ Store(w) \/ Break(w) \/ Die(w) \/ Lose(w)

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
TypeOK ==
  /\ row \in 0..Last /\ high \in 0..Last /\ held \subseteq Messages /\ lease.epoch \in 0..Epochs
  /\ \A w \in Workers : me[w].at \in {"out", "owns", "writes"} /\ Len(me[w].begun) <= Most

(* What the checkpoint has passed the receiver has, or it is held.          *)
NothingLost == \A m \in Messages : m <= row /\ m \notin held => stream[m] > 0

(* As long as no message is left out, each is there once, over any fault.   *)
EachOnce == unfits = 0 => \A m \in Messages : stream[m] <= 1

NeverBack == [][row' >= row]_vars

(* NOT promised: it is there once although one before it was left out.      *)
AlwaysOnce == \A m \in Messages : stream[m] <= 1
(* The model goes there: a batch is confirmed before the one ahead of it    *)
(* is stored.                                                               *)
NeverAhead ==
  \A w \in Workers : Len(me[w].begun) > 1 => ~IsConfirmed(w, me[w].begun[2])

Symmetry == Permutations(Workers)
=============================================================================
