"""One request on its way through the scheduler, and what a step of the scheduler has come to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from dynamo_local.core.errors import BadRequestError
from dynamo_local.core.messages.work import FinishReason, RequestEpoch
from dynamo_local.core.priority.fair_queue import Claim
from dynamo_local.engine.mocker import tokens
from dynamo_local.engine.mocker.blocks import BlockHash, Filling, chain_hash
from dynamo_local.engine.mocker.tokens import Sampling

# State of a request in the scheduler.

_TOKEN_IDS = 2**63


@dataclass(frozen=True)
class Hold:
    """Wish to keep the full blocks of a request under this name for so long after it has finished."""

    name: RequestEpoch
    seconds: float


@dataclass(frozen=True)
class Pull:
    """Another engine's blocks for the blocks from index `start` on of a context, readable until `until`."""

    path: str
    blocks: tuple[int, ...]
    start: int
    until: float
    confirm: str = ""
    """Pin that has to be confirmed after the read for this to count. Empty: `until` decides."""

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def helps(self, cached: int, now: float) -> bool:
        """Whether to read, if the first `cached` blocks are here: nothing may be missing between, and something
        must be new."""
        return self.start <= cached < self.end and now < self.until


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens drawn so far. `tokens` only ever grows; cache and progress come and go.

    Invariants: `blocks` hold at least `computed` tokens, and `computed <= len(tokens)`. One that does not
    run has neither, unless it is being loaded or has been.
    """

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    claim: Claim
    """Its place among those that wait. The lowest is preempted last."""
    end: int
    """Number of tokens, prompt included, at which it is finished whatever they are."""
    root: BlockHash
    state: int
    """State of the context (tokens.py), drawn tokens included."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    cached_tokens: int | None = None
    """Tokens found in the cache, or pulled, when it was first admitted."""
    pull: Pull | None = None
    """Blocks of another engine to be read, unless that has been tried."""
    hold: Hold | None = None
    finish: FinishReason | None = None
    stop_reason: int | None = None
    _hashes: list[BlockHash] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of its context, drawn ones included."""
        return len(self.tokens)

    @property
    def is_over(self) -> bool:
        """Whether it has finished, or was cancelled."""
        return self.finish is not None

    @property
    def drawn(self) -> int:
        return self.length - self.prompt_tokens

    def hashes(self, count: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first `count` blocks, all of which are full."""
        known = self._hashes
        while len(known) < count:
            start = len(known) * block_size
            parent = known[-1] if known else self.root
            known.append(chain_hash(parent, self.tokens[start : start + block_size]))
        return known[:count]

    def draw(self, vocab_size: int, foreign: bytes | None = None) -> None:
        """Append the token that follows, and see whether it is the last one. `foreign` is what the blocks hold if
        that is not what belongs there: then the token is a wrong one."""
        state = self.state
        if foreign is not None:
            state = tokens.absorb((int.from_bytes(foreign[:7]),), state)
        token_id = tokens.draw(state, vocab_size)
        self.tokens.append(token_id)
        self.state = tokens.absorb((token_id,), self.state)
        if self._stops(token_id):
            self.finish = "stop"
        elif len(self.tokens) >= self.end:
            self.finish = "length"

    def _stops(self, token_id: int) -> bool:
        """Whether the token ends the request. As in vLLM, the end-of-sequence token comes first, without a stop reason;
        a stop token is its own reason."""
        sampling = self.sampling
        if len(self.tokens) - self.prompt_tokens <= sampling.min_tokens:
            return False
        if token_id == sampling.eos_token_id and not sampling.ignore_eos:
            return True
        if sampling.stop_token_ids is not None and token_id in sampling.stop_token_ids:
            self.stop_reason = token_id
            return True
        return False


def check_prompt(token_ids: Seq[int], limit: int) -> None:
    """Raise BadRequestError if no request can have this prompt in a context of `limit` tokens."""
    if not token_ids:
        raise BadRequestError("the prompt is empty")
    if len(token_ids) >= limit:
        raise BadRequestError(f"a prompt of {len(token_ids)} tokens leaves no room for output in a context of {limit}")
    if min(token_ids) < 0 or max(token_ids) >= _TOKEN_IDS:
        raise BadRequestError("the prompt has a token id out of range")


# Outcome of a step of the scheduler.


@dataclass(frozen=True)
class Read:
    """Blocks of another engine, `sources`, are to be read into a request's blocks with indices from `start` on."""

    sequence: Sequence
    pull: Pull
    start: int

    @property
    def sources(self) -> tuple[int, ...]:
        return self.pull.blocks[self.start - self.pull.start :]

    @property
    def targets(self) -> list[int]:
        return self.sequence.blocks[self.start : self.pull.end]


@dataclass
class StepOutcome:
    """Work of one step, while it is planned, under way, or complete."""

    budget: int
    """What is left of its budget of tokens."""
    computed: dict[Sequence, int] = field(default_factory=dict)
    """Tokens whose KV is computed."""
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    emitted: list[Sequence] = field(default_factory=list)
    """Requests that draw one token, their last one, and may be finished by it."""
    reads: list[Read] = field(default_factory=list)
    """Reads that begin with the step, but are no part of it: the caller does them and reports their ends."""
    fillings: list[Filling] = field(default_factory=list)

    @property
    def decode_seqs(self) -> int:
        return sum(count == 1 for count in self.computed.values())

    @property
    def prefill_tokens(self) -> int:
        return sum(self.computed.values()) - self.decode_seqs

    @property
    def filled(self) -> set[int]:
        """Blocks that are found in the cache though they are not written before the step's end."""
        return {block for filling in self.fillings for block in filling.blocks[filling.start :]}
