"""An engine of real vLLM loads adapters while it runs: what it says is as of an engine that was started with them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.errors import AdapterError, RequestError
from dynamo_local.core.messages.work import Submit, TokenDelta
from dynamo_local.engine.vllm.engine import VllmEngine
from dynamo_local.model.named.random_model import random_model
from tests.e2e.models.adapters import RANK, make_adapter

pytest.importorskip("vllm", reason="vLLM is not installed")

PROMPT = [ord(letter) % 97 + 32 for letter in "once upon a time " * 8]
CONFIG = {
    "model": str(random_model()),
    "dtype": "float32",
    "max-model-len": 1024,
    "block-size": 32,
    "kv-cache-memory-bytes": 1 << 28,
    "enforce-eager": True,
    "max-num-batched-tokens": 256,
    "max-num-seqs": 4,
    "enable-lora": True,
    "max-lora-rank": RANK,
    "max-loras": 2,
}


class Listed:
    def __init__(self) -> None:
        self.version = 0
        self.folders: dict[str, str] = {}

    def __call__(self) -> tuple[int, dict[str, str]]:
        return self.version, self.folders

    def change(self, **folders: Path) -> None:
        self.version += 1
        self.folders = {name: str(folder) for name, folder in folders.items()}


class Asking:
    """One request after the other."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._number = 0

    async def ask(self, adapter: str | None) -> tuple[list[int], int]:
        """Return the tokens, and how many of the prompt's were cached."""
        self._number += 1
        sampling = msgspec.msgpack.encode({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True})
        request_id = f"r{self._number}"
        await self._engine.submit(Submit(request_id, 1, "f", PROMPT, msgspec.Raw(sampling), adapter=adapter))
        deltas: list[TokenDelta] = []
        while not any(delta.finish for delta in deltas):
            deltas += [delta for delta in (await self._engine.step()).deltas if delta.request_id == request_id]
        assert deltas[-1].finish == "length"
        return [token for delta in deltas for token in delta.token_ids], deltas[0].cached_tokens or 0


async def test_adapters_come_and_go_while_the_engine_runs(own_servers: None, tmp_path: Path) -> None:
    one, two = make_adapter(tmp_path / "one", 1), make_adapter(tmp_path / "two", 2)
    listed = Listed()
    config = {**CONFIG, "lora-modules": [f"static={one}"]}
    private_dir = tmp_path / "private"
    private_dir.mkdir(mode=0o700)
    engine = VllmEngine(config, private_dir, kv_transfer=True, listed=listed)
    try:
        await engine.start(lambda _: None)
        asking = Asking(engine)
        base, _ = await asking.ask(None)
        of_one, _ = await asking.ask("static")
        with pytest.raises(RequestError, match="adapter pirate was deleted or replaced"):
            await asking.ask("pirate")

        listed.change(pirate=one)
        assert await asking.ask("pirate") == (of_one, 0)
        listed.change(pirate=two)
        of_two, cached = await asking.ask("pirate")
        assert cached == 0
        assert len({tuple(tokens) for tokens in (base, of_one, of_two)}) == 3
        # With the content of before, what was computed with it counts again.
        listed.change(pirate=one)
        again, cached = await asking.ask("pirate")
        assert again == of_one
        assert cached > 0

        # Others hand KV over only for the same content.
        prints = []
        for folder in (one, two):
            listed.change(pirate=folder)
            await asking.ask("pirate")
            prefix = engine.prefix(PROMPT, None, "pirate")
            assert prefix is not None
            prints.append((prefix.fingerprint, prefix.hashes[0]))
        assert not set(prints[0]) & set(prints[1])

        # What cannot be loaded says why, and keeps no slot of those that can.
        other = make_adapter(tmp_path / "other", 4, within="")
        dora = make_adapter(tmp_path / "dora", 5, use_dora=True)
        for folder, why in (
            (other, "none of its tensors is for a module of the model (such as layers.0.self_attn"),
            (dora, "vLLM does not yet support DoRA."),
        ):
            listed.change(pirate=folder)
            for _ in range(2):
                with pytest.raises(AdapterError) as failed:
                    await asking.ask("pirate")
                assert str(failed.value).startswith(f"the adapter pirate cannot be loaded: {why}")
        listed.change(pirate=one)
        assert (await asking.ask("pirate"))[0] == of_one

        listed.change(pirate=one, robot=two, parrot=make_adapter(tmp_path / "three", 3))
        assert (await asking.ask("pirate"))[0] == of_one
        with pytest.raises(RequestError, match="max-loras"):
            await asking.ask("robot")
        assert (await asking.ask(None))[0] == base
    finally:
        await engine.close(5.0)
