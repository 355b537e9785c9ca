------------------------------ MODULE Pipeline -----------------------------
(***************************************************************************)
(* Several batches under way, guarantee AtLeastOnce: a target outside the  *)
(* database takes further batches before it has confirmed the first one    *)
(* (outbox_worker/engine/pipeline.py, targets/rabbitmq.py).  What is       *)
(* stored follows the oldest batch.  targets/kafka.py does less: it begins *)
(* a batch when the one before is confirmed.                               *)
(*                                                                         *)
(* The fence is Fence.tla's and one step here: a store is refused unless   *)
(* epoch and expected pair are those of the rows.  A process that is       *)
(* frozen is one that does nothing for long, and a lease may lapse at any  *)
(* moment, so neither needs a variable.                                    *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
  Workers,      \* processes of one resource
  Nobody,
  Last,         \* messages 1..Last are in the outbox
  Most,         \* batches under way (most_under_way)
  Faults,       \* how many connections break or processes die
  Epochs,       \* how often a lease is acquired
  \* What the protocol consists of. All TRUE is what runs.
  OldestFirst,  \* a batch is stored when those before it are
  Awaited,      \* ... and when the target has confirmed all of it
  ReadAgain     \* after a fault of the target nothing under way is believed

VARIABLES
  row,       \* the stored checkpoint: examined up to here
  lease,     \* its epoch and owner
  me,        \* what each process remembers
  sent,      \* what each process wrote and the target has not answered for
  taken,     \* ghost: how often the target took each message, two being often
  faults

vars == <<row, lease, me, sent, taken, faults>>

Messages == 1..Last
Within(batch) == (batch.from + 1)..batch.to

(* `pair`: what the process believes stored. `begun`: batches that were   *)
(* begun and are not stored, in order. `heard`: messages confirmed to it.  *)
Out == [at |-> "out", epoch |-> 0, pair |-> 0, begun |-> <<>>, heard |-> {}]
End(w) == IF me[w].begun = <<>> THEN me[w].pair ELSE me[w].begun[Len(me[w].begun)].to

Become(w, m) == me' = [me EXCEPT ![w] = m]

(* Who held it may not know yet.                                            *)
Acquire(w) ==
  /\ me[w].at = "out" /\ lease.epoch < Epochs
  /\ lease' = [epoch |-> lease.epoch + 1, owner |-> w]
  /\ Become(w, [Out EXCEPT !.at = "owns", !.epoch = lease.epoch + 1, !.pair = row])
  /\ UNCHANGED <<row, sent, taken, faults>>

(* The lease is looked at, and then the batch is written: the look is a    *)
(* step of its own, because the process may be frozen after it.            *)
Look(w) ==
  /\ me[w].at = "owns" /\ Len(me[w].begun) < Most /\ End(w) < Last
  /\ IF lease.owner = w /\ lease.epoch = me[w].epoch
     THEN Become(w, [me[w] EXCEPT !.at = "writes"]) /\ UNCHANGED sent
     ELSE Become(w, Out) /\ sent' = [sent EXCEPT ![w] = {}]
  /\ UNCHANGED <<row, lease, taken, faults>>

Begin(w) ==
  /\ me[w].at = "writes"
  /\ \E to \in (End(w) + 1)..Last :
       LET batch == [from |-> End(w), to |-> to]
       IN /\ Become(w, [me[w] EXCEPT !.at = "owns", !.begun = Append(@, batch)])
          /\ sent' = [sent EXCEPT ![w] = @ \cup (Within(batch) \ me[w].heard)]
  /\ UNCHANGED <<row, lease, taken, faults>>

(* The target takes messages, and confirms them, in any order.              *)
Take(w, m) ==
  /\ m \in sent[w]
  /\ taken' = [taken EXCEPT ![m] = IF @ = 2 THEN 2 ELSE @ + 1]
  /\ sent' = [sent EXCEPT ![w] = @ \ {m}]
  /\ Become(w, [me[w] EXCEPT !.heard = @ \cup {m}])
  /\ UNCHANGED <<row, lease, faults>>

(* store_processor_checkpoint for one batch under way, which ends those     *)
(* before it.                                                               *)
Store(w, n) ==
  LET batch == me[w].begun[n] IN
  /\ me[w].at = "owns" /\ n \in 1..Len(me[w].begun)
  /\ OldestFirst => n = 1
  /\ Awaited => Within(batch) \subseteq me[w].heard
  /\ IF lease.owner = w /\ lease.epoch = me[w].epoch /\ row = me[w].pair
     THEN /\ row' = batch.to
          /\ Become(w, [me[w] EXCEPT !.pair = batch.to, !.begun = SubSeq(@, n + 1, Len(@))])
          /\ UNCHANGED sent
     ELSE /\ Become(w, Out) /\ sent' = [sent EXCEPT ![w] = {}] /\ UNCHANGED row
  /\ UNCHANGED <<lease, taken, faults>>

Fault == faults < Faults /\ faults' = faults + 1

(* The target's connection breaks: what it had not answered for it may     *)
(* have taken, or not.                                                      *)
Break(w) ==
  /\ Fault /\ me[w].at = "owns"
  /\ \E some \in SUBSET sent[w] :
       taken' = [m \in Messages |-> IF m \in some /\ taken[m] < 2 THEN taken[m] + 1 ELSE taken[m]]
  /\ sent' = [sent EXCEPT ![w] = {}]
  /\ Become(w, IF ReadAgain THEN [me[w] EXCEPT !.begun = <<>>]
               ELSE [me[w] EXCEPT !.heard = @ \cup sent[w]])
  /\ UNCHANGED <<row, lease>>

(* What a process wrote before it died the target may still take.           *)
Die(w) ==
  /\ Fault /\ me[w].at # "out"
  /\ Become(w, Out)
  /\ \E some \in SUBSET sent[w] :
       taken' = [m \in Messages |-> IF m \in some /\ taken[m] < 2 THEN taken[m] + 1 ELSE taken[m]]
  /\ sent' = [sent EXCEPT ![w] = {}]
  /\ UNCHANGED <<row, lease>>

Init ==
  /\ row = 0 /\ lease = [epoch |-> 0, owner |-> Nobody]
  /\ me = [w \in Workers |-> Out]
  /\ sent = [w \in Workers |-> {}]
  /\ taken = [m \in Messages |-> 0]
  /\ faults = 0

Next ==
  \E w \in Workers :
    \/ Acquire(w) \/ Look(w) \/ Begin(w) \/ Break(w) \/ Die(w)
    \/ \E m \in Messages : Take(w, m)
    \/ \E n \in 1..Most : n <= Len(me[w].begun) /\ Store(w, n)

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
TypeOK ==
  /\ row \in 0..Last /\ lease.epoch \in 0..Epochs
  /\ \A w \in Workers : me[w].at \in {"out", "owns", "writes"} /\ Len(me[w].begun) <= Most

(* What the checkpoint has passed the target has taken.                     *)
NothingLost == \A m \in Messages : m <= row => taken[m] > 0

(* Without a fault, and while one process owns it, nothing is sent twice.   *)
OnceWithoutFault == faults = 0 /\ lease.epoch <= 1 => \A m \in Messages : taken[m] <= 1

NeverBack == [][row' >= row]_vars

(* NOT promised: a message comes again after a fault.                       *)
NeverAgain == \A m \in Messages : taken[m] <= 1
(* The model goes there: a later batch is confirmed, and an earlier not.    *)
NeverOvertaken ==
  \A w \in Workers :
    Len(me[w].begun) > 1 /\ Within(me[w].begun[2]) \subseteq me[w].heard
      => Within(me[w].begun[1]) \subseteq me[w].heard

Symmetry == Permutations(Workers)
=============================================================================
