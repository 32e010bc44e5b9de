"""What processes tell each other, hop by hop. Frozen, versioned, msgpack (codec.py).

    every process      -> all            Presence        who I am, how I am, how loaded I am
    operator, planner  -> all            LeaseRevoked    route nothing to this process any more
    frontend           -> router         AssignRequest   which worker?          (reply: Assignment)
    frontend           -> router         Released        this request has left its worker
    frontend           -> router         Charges         all of its requests that are with workers
    frontend           -> worker         Submit, Cancel, Ack, Resend, AskExclusive, EndExclusive
    worker             -> frontend       TokenBatch      one an engine step, with all of that frontend's tokens
    frontend           -> worker         CachedQuestion  how much of this prompt is cached?    (reply: CachedAnswer)
    frontend           -> prefill queue  PrefillJob      somebody prefill this request of mine
    prefill worker     -> frontend       PrefillClaim    I would                               (reply: PrefillGrant)
    worker             -> worker         PinQuestion     keep these blocks while I read them   (reply: PinAnswer)
    worker             -> worker         Unpin           I have read them
    operator, planner  -> worker         RoleQuestion    take up another role                  (reply: RoleAnswer)
    operator, planner  -> server         HoldQuestion    hold the devices that are claimed     (reply: Holds)
    frontend           -> worker         Reserve, Warm   keep room, pull KV for a migration    (reply: MigrationAnswer)
    frontend           -> worker         CancelReservation
    operator           -> frontend       RequestsQuestion who works on what?                   (reply: RequestsAnswer)
    operator           -> frontend       MigrationOrder  migrate these                         (reply: MigrationReport)
    planner            -> all            PlannerReport

Times are seconds. `timestamp`s are CLOCK_MONOTONIC, which all processes of a machine share. Positions are 0-based
indices into a request's output. Lengths and loads are in tokens unless the name says otherwise.
"""
