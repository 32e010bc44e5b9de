"""The messages between processes, a module for each kind of hop. Frozen; msgpack, in one envelope with the version
(core/codec.py).

    sender             -> receiver       message           meaning
    every process      -> all            Presence          identity, state and load of the process
    operator, planner  -> all            LeaseRevoked      route no requests to this process any more
    frontend           -> all workers    LeaseLost         a process is gone: wait for none of its answers
    frontend           -> router         AssignRequest     choose a worker (answer: Assignment)
    frontend           -> router         Released          a request has left its worker
    frontend           -> router         Charges           all requests of the frontend that workers have
    frontend           -> worker         Submit, Cancel, Ack, Resend, AskExclusive, EndExclusive
    worker             -> frontend       TokenBatch        the tokens of one engine step for one frontend
    frontend           -> worker         CachedQuestion    how much of a prompt is cached (answer: CachedAnswer)
    frontend           -> prefill queue  PrefillJob        a request to be prefilled
    prefill worker     -> frontend       PrefillClaim      the worker has taken the job (answer: PrefillGrant)
    worker             -> worker         PinQuestion       keep blocks while they are read (answer: PinAnswer)
    worker             -> worker         Unpin             the blocks have been read
    operator, planner  -> worker         RoleQuestion      change the role (answer: RoleAnswer)
    frontend           -> worker         Reserve, Warm     reserve room, pull KV to migrate (answer: MigrationAnswer)
    frontend           -> worker         CancelReservation the migration does not take place
    operator           -> frontend       RequestsQuestion  list requests (answer: RequestsAnswer)
    operator           -> frontend       MigrationOrder    migrate requests (answer: MigrationReport)
    planner            -> all            PlannerReport     what the planner observes and decides

Times are seconds. Each process has a clock of its own (CLOCK_MONOTONIC), so messages tell durations and ages, never a
moment of that clock; the receiver counts from the arrival. The one exception is between processes that have made sure
that they share a clock (PinAnswer.until). Unix time is only shown. Positions are 0-based indices into a request's
output. Lengths and loads are in tokens unless the name says otherwise.
"""
