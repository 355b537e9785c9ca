------------------------------- MODULE Fence -------------------------------
(***************************************************************************)
(* The checkpoint and epoch protocol of one processor and one partition:   *)
(* sql/functions/*.sql on one side, outbox_worker/postgres/transactions/transaction.py    *)
(* and outbox_core/processor/lifecycle.py on the other.  README.md says    *)
(* what is left out and why, and which switch stands for which bad         *)
(* variant.                                                                *)
(*                                                                         *)
(* A pair (transaction_id, position) is its rank here: message m is the    *)
(* m-th in reading order, a checkpoint c means "examined up to m = c".     *)
(* Time has no numbers: a lease may lapse at any moment, and must when     *)
(* nobody renews it; so what holds here holds for every choice of times.   *)
(***************************************************************************)
EXTENDS Integers, TLC

CONSTANTS
  Workers,           \* processes of one resource: one owner and its standbys
  Last,              \* messages 1..Last are in the outbox
  Faults,            \* how many faults of the environment may happen
  Edits,             \* how often somebody edits the checkpoint's row by hand
  Nobody,            \* no process, or one that is dead: no live token
  \* What the protocol consists of. All TRUE, and Doubt = "ask", is what runs.
  EpochChecked,      \* the store compares epoch and token with the lease row
  LapseChecked,      \* ... and its expiry with clock_timestamp()
  FenceLocked,       \* ... and keeps that row FOR KEY SHARE to the commit
  RowLocked,         \* the checkpoint's row is locked before it is compared
  PairCompared,      \* ... with the pair that the caller expects
  CopyCompared,      \* who loads the row compares it with the copy that only stores write
  LateIgnored,       \* a conflict that is recorded under a former epoch opens nothing
  RefusalRollsBack,  \* codes 0, 2, 3 and 4 end in ROLLBACK
  IdleEnded,         \* idle_in_transaction_session_timeout is set
  Doubt              \* COMMIT without an answer: "ask", or assume "failed" or "done"

VARIABLES
  row,       \* processor_checkpoints: the stored pair, None without a row
  kept,      \* ... and its copy, which a hand does not think of
  lease,     \* processor_leases: epoch, token (as its process), not yet expired
  conflict,  \* processor_conflicts: one is open and waits for a person
  ses,       \* the transactions of the sessions at the server
  me,        \* what each process remembers
  frozen,    \* SIGSTOP, a stalled node: all threads of the process
  done,      \* ghost: how often the effects of each message were committed
  edits,     \* how often a hand changed the row: an edit, or a person's rewind
  faults     \* how many faults there were

environment == <<frozen, edits, faults>>
vars == <<row, kept, lease, conflict, ses, me, done, environment>>

None == -1
Messages == 1..Last
Pairs == {None} \cup 0..Last

(* A process has at most two sessions: the one it uses now, and one whose  *)
(* connection broke while the server still works for it.                   *)
Sessions == Workers \X {"now", "lost"}
Now(w) == <<w, "now">>
Lost(w) == <<w, "lost">>

Unasked == -1
(* `asks`: the statement under way. "store" and "compare" are the two      *)
(* halves of store_processor_checkpoint; "committed": done, not yet told.  *)
Closed == [open |-> FALSE, asks |-> "nothing", answer |-> Unasked, epoch |-> 0, from |-> 0, to |-> 0]
Begun(e, from, to) ==
  [open |-> TRUE, asks |-> "nothing", answer |-> Unasked, epoch |-> e, from |-> from, to |-> to]

(* `pair`: what the process believes stored, and expects at the next store *)
(* `new`: the end of the batch in hand.                                    *)
NoMemory == [at |-> "out", epoch |-> 0, pair |-> 0, new |-> 0, code |-> Unasked]

----------------------------------------------------------------------------
(* Locks, as they follow from what a transaction has done.                 *)

HoldsFence(s) == FenceLocked /\ ses[s].open /\ (ses[s].asks = "compare" \/ ses[s].answer \in 0..3)
HoldsRow(s) == RowLocked /\ ses[s].open /\ ses[s].answer \in 0..3
FenceFree == \A s \in Sessions : ~HoldsFence(s)
RowFree == \A s \in Sessions : ~HoldsRow(s)

(* holds_lease.sql *)
IsOwner(w, epoch) ==
  ~EpochChecked \/ (lease.owner = w /\ lease.epoch = epoch /\ (lease.live \/ ~LapseChecked))

(* The contract's table, steps 3 to 8 (steps 1 and 2 are in Fence).        *)
Answer(stored, new, expected) ==
  CASE stored = new                         -> 0
    [] stored # new /\ ~PairCompared        -> 1
    [] stored # new /\ PairCompared ->
         CASE stored = expected             -> 1
           [] stored > expected             -> 2
           [] stored < expected             -> 3      \* also without a row

----------------------------------------------------------------------------
(* What a process does; it does nothing while it is frozen.                *)

Is(w, places) == ~frozen[w] /\ me[w].at \in places

Become(w, m) == me' = [me EXCEPT ![w] = m]
Out(w) == Become(w, NoMemory)
GoOnFrom(w, pair) == Become(w, [me[w] EXCEPT !.at = "fetch", !.pair = pair, !.new = 0])

(* acquire_lease.sql: FOR UPDATE waits for FOR KEY SHARE, gives up after a  *)
(* lock timeout and is tried again; so it happens only when it is free.     *)
Acquire(w) ==
  /\ Is(w, {"out"})
  /\ ~conflict
  /\ ~(lease.live /\ lease.owner # w)
  /\ FenceFree
  /\ lease' = [epoch |-> lease.epoch + 1, owner |-> w, live |-> TRUE]
  /\ Become(w, [NoMemory EXCEPT !.at = "load", !.epoch = lease.epoch + 1])
  /\ UNCHANGED <<row, kept, conflict, ses, done, environment>>

(* ensure_start: the row if there is one, else the start, under our epoch.  *)
(* find_tampering: a row that is not its copy was changed by hand; the process  *)
(* that was told so may not have come to record it.                         *)
Load(w) ==
  /\ Is(w, {"load"})
  /\ IF CopyCompared /\ row # kept
     THEN /\ Become(w, [me[w] EXCEPT !.at = "refused", !.code = IF row > kept THEN 2 ELSE 3])
          /\ UNCHANGED <<row, kept>>
     ELSE IF row # None
     THEN GoOnFrom(w, row) /\ UNCHANGED <<row, kept>>
     ELSE IF IsOwner(w, me[w].epoch)
     THEN RowFree /\ row' = 0 /\ kept' = 0 /\ GoOnFrom(w, 0)
     ELSE Out(w) /\ UNCHANGED <<row, kept>>
  /\ UNCHANGED <<lease, conflict, ses, done, environment>>

(* A batch of any size; BEGIN with SET LOCAL idle_in_transaction_...        *)
Begin(w) ==
  /\ Is(w, {"fetch"})
  /\ \E to \in (me[w].pair + 1)..Last :
       /\ ses' = [ses EXCEPT ![Now(w)] = Begun(me[w].epoch, me[w].pair, to)]
       /\ Become(w, [me[w] EXCEPT !.at = "work", !.new = to])
  /\ UNCHANGED <<row, kept, lease, conflict, done, environment>>

AskToStore(w) ==
  /\ Is(w, {"work"})
  /\ ses[Now(w)].open /\ ses[Now(w)].asks = "nothing" /\ ses[Now(w)].answer = Unasked
  /\ ses' = [ses EXCEPT ![Now(w)].asks = "store"]
  /\ UNCHANGED <<row, kept, lease, conflict, me, done, environment>>

TakeAnswer(w) ==
  LET code == ses[Now(w)].answer IN
  /\ Is(w, {"work"})
  /\ ses[Now(w)].open /\ ses[Now(w)].asks = "nothing" /\ code # Unasked
  /\ IF code = 1 \/ ~RefusalRollsBack
     THEN Become(w, [me[w] EXCEPT !.at = "commit"]) /\ UNCHANGED ses
     ELSE /\ ses' = [ses EXCEPT ![Now(w)] = Closed]
          /\ IF code = 0 THEN GoOnFrom(w, me[w].new)
             ELSE Become(w, [me[w] EXCEPT !.at = "refused", !.code = code])
  /\ UNCHANGED <<row, kept, lease, conflict, done, environment>>

AskToCommit(w) ==
  /\ Is(w, {"commit"})
  /\ ses[Now(w)].open /\ ses[Now(w)].asks = "nothing"
  /\ ses' = [ses EXCEPT ![Now(w)].asks = "commit"]
  /\ UNCHANGED <<row, kept, lease, conflict, me, done, environment>>

HearOfCommit(w) ==
  /\ Is(w, {"commit"}) /\ ses[Now(w)].asks = "committed"
  /\ ses' = [ses EXCEPT ![Now(w)] = Closed]
  /\ GoOnFrom(w, me[w].new)
  /\ UNCHANGED <<row, kept, lease, conflict, done, environment>>

(* The connection turns out to be broken, before COMMIT or in it.           *)
FindBroken(w) ==
  /\ Is(w, {"work", "commit"}) /\ ses[Now(w)] = Closed
  /\ Become(w, [me[w] EXCEPT !.at = IF me[w].at = "commit" THEN "unsure" ELSE "lost"])
  /\ UNCHANGED <<row, kept, lease, conflict, ses, done, environment>>

(* Step.CONFIRM on a new connection, before anything else: settle (only for *)
(* "unsure"), then the contract once more without effect. Both wait for     *)
(* the row's lock, so for the end of the old transaction.                   *)
Confirm(w) ==
  LET unsure == me[w].at = "unsure"
      owner == IsOwner(w, me[w].epoch)
      code == Answer(row, me[w].new, me[w].pair)
      Refused(c) == Become(w, [me[w] EXCEPT !.at = "refused", !.code = c])
  IN
  /\ Is(w, {"unsure", "lost"})
  /\ CASE unsure /\ Doubt = "failed" -> GoOnFrom(w, me[w].pair)
       [] unsure /\ Doubt = "done"   -> GoOnFrom(w, me[w].new)
       [] OTHER ->
            IF ~owner THEN IF unsure THEN Out(w) ELSE Refused(4)
            ELSE /\ RowFree
                 /\ CASE code = 0 -> GoOnFrom(w, me[w].new)     \* it was committed
                      [] code = 1 -> GoOnFrom(w, me[w].pair)    \* it was not
                      [] OTHER    -> Refused(code)
  /\ UNCHANGED <<row, kept, lease, conflict, ses, done, environment>>

(* Step.RECORD: its own transaction, because the refused one rolled back.   *)
(* Too late, it is history: the successor has seen the row and its copy.    *)
Record(w) ==
  /\ Is(w, {"refused"})
  /\ IF me[w].code = 4 THEN UNCHANGED <<conflict, lease>>
     ELSE /\ conflict' = (conflict \/ ~LateIgnored \/ lease.epoch = me[w].epoch)
          /\ lease' = IF lease.owner = w /\ lease.epoch = me[w].epoch
                      THEN [lease EXCEPT !.owner = Nobody, !.live = FALSE] ELSE lease
  /\ Out(w)
  /\ UNCHANGED <<row, kept, ses, done, environment>>

Process(w) ==
  \/ Acquire(w) \/ Load(w) \/ Begin(w) \/ AskToStore(w) \/ TakeAnswer(w) \/ AskToCommit(w)
  \/ HearOfCommit(w) \/ FindBroken(w) \/ Confirm(w) \/ Record(w)

----------------------------------------------------------------------------
(* What the server does for a session, whether its client is frozen,        *)
(* connected, alive, or not.                                                *)

(* store_processor_checkpoint, step 2: who is not the owner gets 4 and      *)
(* leaves no lock; the owner's fence is locked from here to the commit.     *)
Fence(s) ==
  /\ ses[s].open /\ ses[s].asks = "store"
  /\ ses' = [ses EXCEPT ![s] = IF IsOwner(s[1], ses[s].epoch)
                               THEN [@ EXCEPT !.asks = "compare"]
                               ELSE [@ EXCEPT !.asks = "nothing", !.answer = 4]]
  /\ UNCHANGED <<row, kept, done, lease, conflict, me, environment>>

(* Steps 3 to 8: waits for the row's lock.                                  *)
Compare(s) ==
  /\ ses[s].open /\ ses[s].asks = "compare"
  /\ RowFree
  /\ ses' = [ses EXCEPT ![s].asks = "nothing", ![s].answer = Answer(row, ses[s].to, ses[s].from)]
  /\ UNCHANGED <<row, kept, done, lease, conflict, me, environment>>

(* The effects of the batch, and the checkpoint if it was stored.           *)
Commit(s) ==
  /\ ses[s].open /\ ses[s].asks = "commit"
  /\ done' = [m \in Messages |-> IF ses[s].from < m /\ m <= ses[s].to THEN done[m] + 1 ELSE done[m]]
  /\ row' = IF ses[s].answer = 1 THEN ses[s].to ELSE row
  /\ kept' = IF ses[s].answer = 1 THEN ses[s].to ELSE kept
  /\ ses' = [ses EXCEPT ![s] = IF s[2] = "now" THEN [Closed EXCEPT !.asks = "committed"] ELSE Closed]
  /\ UNCHANGED <<lease, conflict, me, environment>>

(* The idle timeout ends a transaction between statements whose process is  *)
(* frozen or gone. (A process that computes is kept from it: its heartbeat  *)
(* thread sends something on that connection.)                              *)
EndIdle(s) ==
  /\ IdleEnded
  /\ ses[s].open /\ ses[s].asks = "nothing"
  /\ frozen[s[1]] \/ s[2] = "lost"
  /\ ses' = [ses EXCEPT ![s] = Closed]
  /\ UNCHANGED <<row, kept, done, lease, conflict, me, environment>>

(* The server notices a broken connection, at any moment, or never.         *)
Drop(s) ==
  /\ s[2] = "lost" /\ ses[s].open
  /\ ses' = [ses EXCEPT ![s] = Closed]
  /\ UNCHANGED <<row, kept, done, lease, conflict, me, environment>>

Server(s) == Fence(s) \/ Compare(s) \/ Commit(s) \/ EndIdle(s)

(* A lease that is not renewed lapses: its holder is dead, frozen, or has   *)
(* forgotten it.                                                            *)
Unrenewed == IF lease.owner = Nobody THEN TRUE
             ELSE frozen[lease.owner] \/ me[lease.owner].at = "out"
Lapse ==
  /\ lease.live /\ Unrenewed
  /\ lease' = [lease EXCEPT !.live = FALSE]
  /\ UNCHANGED <<row, kept, conflict, ses, me, done, environment>>

----------------------------------------------------------------------------
(* What befalls them. Every fault counts; there are at most `Faults`.       *)

Fault == faults < Faults /\ faults' = faults + 1

Freeze(w) ==
  /\ Fault /\ ~frozen[w] /\ frozen' = [frozen EXCEPT ![w] = TRUE]
  /\ UNCHANGED <<row, kept, lease, conflict, ses, me, done, edits>>

Thaw(w) ==
  /\ frozen[w] /\ frozen' = [frozen EXCEPT ![w] = FALSE]
  /\ UNCHANGED <<row, kept, lease, conflict, ses, me, done, edits, faults>>

(* The heartbeat alone fails: its connection, its thread.                   *)
LoseHeartbeat ==
  /\ Fault /\ lease.live
  /\ lease' = [lease EXCEPT !.live = FALSE]
  /\ UNCHANGED <<row, kept, conflict, ses, me, frozen, done, edits>>

Disconnected(w) ==
  IF ses[Now(w)].open
  THEN ~ses[Lost(w)].open /\ ses' = [ses EXCEPT ![Lost(w)] = ses[Now(w)], ![Now(w)] = Closed]
  ELSE ses' = [ses EXCEPT ![Now(w)] = Closed]

(* The connection breaks; the server goes on with the statement it has.     *)
Cut(w) ==
  /\ Fault /\ ses[Now(w)] # Closed /\ Disconnected(w)
  /\ UNCHANGED <<row, kept, lease, conflict, me, frozen, done, edits>>

(* SIGKILL, frozen or not; what starts in its place has another token.      *)
Crash(w) ==
  /\ Fault /\ me[w].at # "out" /\ Disconnected(w) /\ Out(w)
  /\ frozen' = [frozen EXCEPT ![w] = FALSE]
  /\ lease' = IF lease.owner = w THEN [lease EXCEPT !.owner = Nobody] ELSE lease
  /\ UNCHANGED <<row, kept, conflict, done, edits>>

(* SIGTERM between two transactions: release_lease.sql, which waits for no  *)
(* fence, although a COMMIT of ours may still be under way.                 *)
Leave(w) ==
  /\ Fault /\ ~frozen[w] /\ me[w].at \in {"load", "fetch", "unsure", "lost", "refused"} /\ Out(w)
  /\ lease' = IF lease.owner = w /\ lease.epoch = me[w].epoch
              THEN [lease EXCEPT !.owner = Nobody, !.live = FALSE] ELSE lease
  /\ UNCHANGED <<row, kept, conflict, ses, frozen, done, edits>>

(* Somebody updates or deletes the checkpoint's row by hand.                *)
Edit ==
  /\ edits < Edits /\ edits' = edits + 1 /\ RowFree
  /\ row' \in Pairs \ {row} /\ UNCHANGED kept
  /\ UNCHANGED <<lease, conflict, ses, me, frozen, done, faults>>

(* resolve_conflict.sql: accept the stored pair; or rewind, while no owner  *)
(* is live.                                                                 *)
Resolve ==
  /\ conflict /\ conflict' = FALSE
  /\ \/ row # None /\ row' = row
     \/ ~lease.live /\ FenceFree /\ RowFree /\ row' \in 0..Last
  /\ kept' = row'
  /\ edits' = IF row' = row THEN edits ELSE edits + 1
  /\ UNCHANGED <<lease, ses, me, frozen, done, faults>>

----------------------------------------------------------------------------
Init ==
  /\ row = None /\ kept = None
  /\ lease = [epoch |-> 0, owner |-> Nobody, live |-> FALSE]
  /\ conflict = FALSE
  /\ ses = [s \in Sessions |-> Closed]
  /\ me = [w \in Workers |-> NoMemory]
  /\ frozen = [w \in Workers |-> FALSE]
  /\ done = [m \in Messages |-> 0]
  /\ edits = 0 /\ faults = 0

Next ==
  \/ \E w \in Workers : Process(w) \/ Freeze(w) \/ Thaw(w) \/ Cut(w) \/ Crash(w) \/ Leave(w)
  \/ \E s \in Sessions : Server(s) \/ Drop(s)
  \/ Lapse \/ LoseHeartbeat \/ Edit \/ Resolve

(* What is bound to happen if it can: steps of processes that are not       *)
(* frozen, of the server, and the clock's. No fault must, no thaw, no drop. *)
Spec ==
  /\ Init /\ [][Next]_vars
  /\ \A w \in Workers : WF_vars(Process(w))
  /\ \A s \in Sessions : WF_vars(Server(s))
  /\ WF_vars(Lapse)

----------------------------------------------------------------------------
(* Safety.                                                                  *)

TypeOK ==
  /\ row \in Pairs /\ kept \in Pairs
  /\ lease \in [epoch : Nat, owner : Workers \cup {Nobody}, live : BOOLEAN]
  /\ ses \in [Sessions -> [open : BOOLEAN, asks : {"nothing", "store", "compare", "commit", "committed"},
                           answer : -1..4, epoch : Nat, from : 0..Last, to : 0..Last]]
  /\ me \in [Workers -> [at : {"out", "load", "fetch", "work", "commit", "unsure", "lost", "refused"},
                         epoch : Nat, pair : 0..Last, new : 0..Last, code : {Unasked, 2, 3, 4}]]

(* No message's effects are committed twice or skipped: with nobody else's  *)
(* hand in it, those up to the checkpoint are there once, no others.        *)
ExactlyOnce ==
  edits = 0 => kept = row /\ \A m \in Messages : done[m] = IF m <= row THEN 1 ELSE 0

(* With or without: effects come with the checkpoint that counts them, and  *)
(* go on from exactly the pair that was stored.                             *)
EffectsWithCheckpoint ==
  [][done' # done => \A m \in Messages : done'[m] = done[m] + (IF row < m /\ m <= row' THEN 1 ELSE 0)]_vars

(* The checkpoint moves back by a hand only.                                *)
NeverBack ==
  [][row' < row => edits' # edits]_vars

(* Who was told 1 and may still commit is of the latest epoch.              *)
NoneSuperseded ==
  \A s \in Sessions : ses[s].open /\ ses[s].answer = 1 => ses[s].epoch = lease.epoch

(* The fence lets nobody pass but the owner, while its lease is live.       *)
OnlyLiveOwnersPass ==
  [][\A s \in Sessions : ses[s].asks = "store" /\ ses'[s].asks = "compare" =>
        lease.live /\ lease.owner = s[1] /\ lease.epoch = ses[s].epoch]_vars

RefusalsRollBack ==
  \A s \in Sessions : ses[s].asks = "commit" => ses[s].answer = 1

(* 2 and 3 are told, and recorded, only if somebody edited the row.         *)
NoFalseConflict ==
  conflict \/ (\E w \in Workers : me[w].code \in {2, 3}) => edits > 0

(* While a conflict is open no epoch begins.                                *)
ConflictsStop ==
  [][conflict => lease'.epoch = lease.epoch]_vars

(* ... and nobody commits.                                                  *)
NobodyWorksDuringConflict ==
  conflict => \A s \in Sessions : ~(ses[s].open /\ ses[s].asks = "commit")

(* Whoever loads the row goes on from what was stored, or accepted.         *)
NothingEditedIsLoaded ==
  [][\A w \in Workers : me[w].at = "load" /\ me'[w].at = "fetch" => me'[w].pair = kept']_vars

(* Liveness: if only one process is not frozen for ever, all is handled.    *)
StandbyGoesOn ==
  (\E w \in Workers : <>[]~frozen[w]) => <>[](row = Last)

----------------------------------------------------------------------------
(* NOT promised, and checked to be possible: see README.md.                 *)

NoCommitAfterLapse ==
  \A s \in Sessions : ses[s].open /\ ses[s].asks = "commit" => lease.live

(* The frozen places, with a successor: the model would be worth little if  *)
(* it never went there.                                                     *)
Replaced(w, place) ==
  frozen[w] /\ me[w].at = place /\ lease.owner \notin {w, Nobody} /\ lease.epoch > me[w].epoch
NeverReplacedBetweenBatches == ~\E w \in Workers : Replaced(w, "fetch")
NeverReplacedBeforeStore == ~\E w \in Workers : Replaced(w, "work")
NeverReplacedBeforeCommit == ~\E w \in Workers : Replaced(w, "commit")
NeverReplacedInsideStatement ==
  ~\E w \in Workers : Replaced(w, "work") /\ ses[Now(w)].asks = "store"

Symmetry == Permutations(Workers)
=============================================================================
