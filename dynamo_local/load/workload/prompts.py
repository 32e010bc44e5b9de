"""Writes prompts: random but repeatable, of exact length, with shared prefixes and blocks as planned."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

from dynamo_local.load.workload.workload import BLOCK_TOKENS, Planned

_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back face others level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(_NOUNS.split())
"""Words that are one token for most tokenizers."""

_TABLE_SIZE = 1 << 16


class Alphabet:
    """The letters of prompts: token ids, or words. Of more than 65,536, a random sample of that size is used."""

    def __init__(self, letters: Sequence[int] | Sequence[str], seed: int) -> None:
        if not letters:
            raise ValueError("an alphabet needs letters")
        self.is_text = isinstance(letters[0], str)
        used = (
            letters if len(letters) <= _TABLE_SIZE else random.Random(f"{seed}/alphabet").sample(letters, _TABLE_SIZE)
        )
        encoded = [str(letter).encode() for letter in used]
        # Filled to 2**16 entries: a 16-bit random number is an index, ten times cheaper than random.choices.
        self._table = [encoded[index % len(encoded)] for index in range(_TABLE_SIZE)]

    def letters(self, draw: random.Random, count: int) -> list[bytes]:
        """Draw letters, encoded as in JSON. With the same state of `draw`, fewer letters are a prefix of more."""
        even = count + count % 2  # random.randbytes is a prefix of a longer one only in whole words of 4 bytes
        numbers = array("H", draw.randbytes(2 * even))
        return list(map(self._table.__getitem__, numbers[:count]))


class Prompts:
    """Writes the prompt of each planned request as JSON: an array of token ids, or a string."""

    def __init__(self, alphabet: Alphabet, seed: int) -> None:
        self._alphabet = alphabet
        self._seed = seed

    def write(self, index: int, planned: Planned) -> bytes:
        """Write the prompt of a request. Its unshared part depends on `index`."""
        letters: list[bytes] = []
        for part, count in self._parts(index, planned):
            letters += self._alphabet.letters(random.Random(f"{self._seed}/{part}"), count)
        if self._alphabet.is_text:
            return b'"' + b" ".join(letters) + b'"'
        return b"[" + b",".join(letters) + b"]"

    def _parts(self, index: int, planned: Planned) -> Iterator[tuple[str, int]]:
        """Yield the parts of the prompt: a name that seeds the part, and its length in tokens."""
        left = planned.input_tokens
        if planned.shared_tokens:
            yield f"group/{planned.group}", planned.shared_tokens
            left -= planned.shared_tokens
        for block in planned.blocks:
            if left <= 0:
                return
            yield f"block/{block}", min(BLOCK_TOKENS, left)
            left -= BLOCK_TOKENS
        if left > 0:
            yield f"request/{index}", left
