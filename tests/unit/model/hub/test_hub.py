"""Fetching a model from a hub that is imitated on loopback."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="the hub's library is not installed")

from huggingface_hub import close_session, scan_cache_dir, try_to_load_from_cache

from dynamo_local.core.errors import DynamoError, FetchError, UsageError
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.model.hub import hub as hub_module
from dynamo_local.model.hub.hub import HubSettings, config_files, parse_id
from dynamo_local.model.obtain import Obtained, obtain, wish_of
from tests.unit.model.hub.imitated_hub import COMMIT, REPO, ImitatedHub, imitated_hub
from tests.unit.model.model_folders import CONFIG, WEIGHTS, model_files, safetensors, write_model


class Lines:
    """A report that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def hub() -> Iterator[ImitatedHub]:
    with imitated_hub(model_files()) as running:
        yield running


@pytest.fixture
def settings(hub: ImitatedHub, tmp_path: Path) -> HubSettings:
    return HubSettings(endpoint=hub.url, cache=tmp_path / "cache", silence_s=20, tries=3, pause_s=0.01)


def test_a_model_is_fetched_into_the_cache_of_the_hub(hub: ImitatedHub, settings: HubSettings) -> None:
    report = Lines()
    obtained = obtain(REPO, report, settings=settings)
    assert report.lines == [
        f"org/name: looking it up on {settings.host}",
        "org/name: configuration and tokenizer: 1 MB fetched",
        "org/name: weights: 1 MB fetched",
    ]
    folder = settings.cache / "models--org--name" / "snapshots" / COMMIT
    assert (obtained.model, obtained.folder, obtained.served_name) == (str(folder), folder, REPO)
    assert obtained.facts.weight_bytes == len(WEIGHTS)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "README.md").exists()


def test_the_library_of_the_hub_finds_what_was_fetched(hub: ImitatedHub, settings: HubSettings) -> None:
    obtain(REPO, Lines(), settings=settings)
    found = try_to_load_from_cache(REPO, "model.safetensors", cache_dir=settings.cache)
    assert isinstance(found, str)
    assert Path(found).read_bytes() == WEIGHTS
    scanned = scan_cache_dir(settings.cache)
    assert [repo.repo_id for repo in scanned.repos] == [REPO]
    assert not scanned.warnings


def test_nothing_is_fetched_twice(hub: ImitatedHub, settings: HubSettings) -> None:
    first = obtain(REPO, Lines(), settings=settings)
    hub.requests.clear()
    assert obtain(REPO, Lines(), settings=settings) == first
    assert list(hub.requests) == [f"GET /api/models/{REPO}"]


def test_only_what_vllm_loads_is_fetched(hub: ImitatedHub, settings: HubSettings) -> None:
    hub.files |= {"pytorch_model.bin": b"1", "onnx/model.onnx": b"2", "original/params.json": b"3", "model.gguf": b"4"}
    folder = obtain(REPO, Lines(), settings=settings).folder
    assert folder is not None
    fetched = {path.name for path in folder.rglob("*")}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_files_beside_the_weights() -> None:
    wanted = {"chat_template.jinja", "vocab.txt", "modeling_own.py", "1_Pooling/config.json", "tokenizer.model"}
    assert set(config_files({*wanted, "a.png", "consolidated.00.pth", "onnx/config.json", "README.md"})) == wanted


def test_the_model_may_be_refused_before_its_weights_are_fetched(hub: ImitatedHub, settings: HubSettings) -> None:
    seen: list[ModelFacts] = []

    def refuse(facts: ModelFacts) -> None:
        seen.append(facts)
        raise UsageError("too large")

    with pytest.raises(UsageError, match="too large"):
        obtain(REPO, Lines(), refuse, settings)
    assert [(facts.weight_bytes, facts.layers) for facts in seen] == [(len(WEIGHTS), 2)]
    assert not any("safetensors" in request for request in hub.requests)


def shards(hub: ImitatedHub) -> None:
    shard = safetensors({"a": ("F32", [10], 40)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.files.pop("model.safetensors")
    hub.files |= {"model-1.safetensors": shard, "model-2.safetensors": shard, "other.safetensors": shard}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()


def test_the_shards_of_the_index_are_fetched(hub: ImitatedHub, settings: HubSettings) -> None:
    shards(hub)
    folder = obtain(REPO, Lines(), settings=settings).folder
    assert folder is not None
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model-1.safetensors", "model-2.safetensors"]


def gate(hub: ImitatedHub) -> None:
    hub.gated = True


def make_private(hub: ImitatedHub) -> None:
    hub.token = "hf_right"


def fail_always(status: int) -> Callable[[ImitatedHub], None]:
    def fail(hub: ImitatedHub) -> None:
        hub.failing, hub.failure = 1_000_000, status

    return fail


def with_config(**changes: object) -> Callable[[ImitatedHub], None]:
    return lambda hub: hub.files.update({"config.json": json.dumps(CONFIG | changes).encode()})


def without(*names: str) -> Callable[[ImitatedHub], None]:
    def remove(hub: ImitatedHub) -> None:
        for name in names:
            hub.files.pop(name)

    return remove


def cut_always(hub: ImitatedHub) -> None:
    hub.cut = 0


def spoil(hub: ImitatedHub) -> None:
    hub.wrong_digest = True


def misreport(hub: ImitatedHub) -> None:
    hub.listed_sizes["model.safetensors"] = 5


def hide_etags(hub: ImitatedHub) -> None:
    hub.no_etags = True


def only_gguf(hub: ImitatedHub) -> None:
    hub.files = {"model.gguf": b"GGUF", "README.md": b""}


def nothing(hub: ImitatedHub) -> None:
    """The hub works."""


MISTAKES: dict[str, tuple[Callable[[ImitatedHub], None], str, str, int]] = {
    "no such model": (nothing, "org/nane", r"no model org/nane on 127\.0\.0\.1:\d+; check the spelling; a private", 2),
    "no organisation": (nothing, "nane", r"nane is neither a folder nor a model on .*; write ORG/NAME", 2),
    "no such revision": (nothing, f"{REPO}@v9", r"org/name has no revision 'v9'; name a branch", 2),
    "no id": (nothing, "org/name/more", r"there is no folder org/name/more; check the path", 2),
    "private": (make_private, REPO, r"there is no model org/name .*; a private model needs a token in HF_TOKEN", 2),
    "gated": (gate, REPO, r"is gated.*; accept its terms at http://127\.0\.0\.1:\d+/org/name and set HF_TOKEN", 2),
    "server fails": (fail_always(502), REPO, r"fails with status 502; try again later", 1),
    "too many requests": (fail_always(429), REPO, r"too many requests; wait some minutes, or set HF_TOKEN", 1),
    "bad token": (fail_always(403), REPO, r"refuses the token in HF_TOKEN \(status 403\)", 2),
    "unknown answer": (fail_always(418), REPO, r"answers with status 418 when asked for org/name", 1),
    "weights that break off": (cut_always, REPO, r"the connection to 127\.0\.0\.1:\d+ was cut; try again", 1),
    "weights that are others": (spoil, REPO, r"model\.safetensors is not what the hub announced", 1),
    "weights of another size": (misreport, REPO, r"has [\d,]+ bytes on the hub, whose list says 5", 1),
    "no hub": (hide_etags, REPO, r"gives no ETag for .*; check HF_ENDPOINT", 1),
    "only GGUF": (only_gguf, REPO, r"org/name has only weights in the format GGUF", 2),
    "no configuration": (without("config.json"), REPO, r"org/name has no config\.json", 2),
    "no weights": (without("model.safetensors"), REPO, r"org/name has no weights that vLLM loads", 2),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), REPO, r"org/name has no tokenizer", 2),
    "code of its own": (
        with_config(model_type="own", auto_map={"AutoConfig": "c.C"}),
        REPO,
        r"org/name is loaded by Python code of its own.*set trust-remote-code",
        2,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(hub: ImitatedHub, settings: HubSettings, name: str) -> None:
    spoil_hub, model, said, exit_code = MISTAKES[name]
    spoil_hub(hub)
    with pytest.raises(DynamoError) as caught:
        obtain(model, Lines(), settings=settings)
    assert re.search(said, str(caught.value))
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    assert caught.value.exit_code == exit_code


def test_a_token_opens_a_private_model_and_stays_secret(hub: ImitatedHub, settings: HubSettings) -> None:
    make_private(hub)
    with_token = replace(settings, token="hf_right")
    assert obtain(REPO, Lines(), settings=with_token).folder is not None
    assert "hf_right" not in repr(with_token)


def test_a_gated_model_with_a_token_names_the_account(hub: ImitatedHub, settings: HubSettings) -> None:
    gate(hub)
    with pytest.raises(UsageError, match="with the account of your token"):
        obtain(REPO, Lines(), settings=replace(settings, token="hf_some"))


def test_a_download_that_was_cut_goes_on_where_it_was(hub: ImitatedHub, settings: HubSettings) -> None:
    hub.cut, hub.cuts = 20_000, 2
    report = Lines()
    assert obtain(REPO, report, settings=settings).facts.weight_bytes == len(WEIGHTS)
    assert hub.ranges == ["bytes=20000-", "bytes=40000-"]
    assert any("trying again" in line for line in report.lines)


def test_a_later_start_goes_on_where_the_last_one_ended(hub: ImitatedHub, settings: HubSettings) -> None:
    hub.cut = 0
    hub.files["model.safetensors"] = WEIGHTS
    partial = settings.cache / "models--org--name" / "blobs" / f"{hub.etag('model.safetensors')}.dynamo-incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:30_000])
    hub.cut = None
    obtained = obtain(REPO, Lines(), settings=settings)
    assert obtained.folder is not None
    assert (obtained.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == ["bytes=30000-"]
    assert not partial.exists()


def test_a_server_without_ranges_starts_over(hub: ImitatedHub, settings: HubSettings) -> None:
    hub.cut, hub.cuts, hub.no_ranges = 20_000, 1, True
    folder = obtain(REPO, Lines(), settings=settings).folder
    assert folder is not None
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_what_an_earlier_download_left_is_not_trusted(hub: ImitatedHub, settings: HubSettings) -> None:
    partial = settings.cache / "models--org--name" / "blobs" / f"{hub.etag('model.safetensors')}.dynamo-incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * len(WEIGHTS))
    with pytest.raises(FetchError, match="not what the hub announced"):
        obtain(REPO, Lines(), settings=settings)
    obtain(REPO, Lines(), settings=settings)  # the next try starts with nothing


def test_silence_is_told_and_given_up_after_some_tries(hub: ImitatedHub, settings: HubSettings) -> None:
    hub.stalled = True
    report = Lines()
    with pytest.raises(FetchError, match=r"has not answered for 0\.3 s"):
        obtain(REPO, report, settings=replace(settings, silence_s=0.3))
    assert any("no byte has come for a while; trying again (2 of 2)" in line for line in report.lines)


def test_a_server_that_recovers_is_asked_again(hub: ImitatedHub, settings: HubSettings) -> None:
    hub.failing, hub.failing_at = 2, "/cdn/"
    report = Lines()
    assert obtain(REPO, report, settings=settings).facts.weight_bytes == len(WEIGHTS)
    assert "model.safetensors: the hub answers with status 503; trying again (2 of 2)" in report.lines


def fill_cache(settings: HubSettings) -> Obtained:
    return obtain(REPO, Lines(), settings=settings)


def test_offline_with_a_filled_cache(hub: ImitatedHub, settings: HubSettings) -> None:
    filled = fill_cache(settings)
    hub.requests.clear()
    report = Lines()
    assert obtain(REPO, report, settings=replace(settings, offline=True)) == filled
    assert report.lines == ["HF_HUB_OFFLINE is set: org/name is taken from the cache"]
    assert not hub.requests


def test_without_a_network_the_cache_is_used(hub: ImitatedHub, settings: HubSettings) -> None:
    filled = fill_cache(settings)
    report = Lines()
    assert obtain(REPO, report, settings=replace(settings, endpoint="http://127.0.0.1:9")) == filled
    assert "127.0.0.1:9 cannot be reached" in report.lines[-1]
    assert "taken from the cache" in report.lines[-1]


def test_a_commit_in_the_cache_is_found_offline(hub: ImitatedHub, settings: HubSettings) -> None:
    filled = fill_cache(settings)
    offline = replace(settings, offline=True)
    assert obtain(f"{REPO}@{COMMIT}", Lines(), settings=offline).folder == filled.folder


def test_offline_without_a_copy(settings: HubSettings) -> None:
    with pytest.raises(UsageError, match=r"HF_HUB_OFFLINE is set, and org/name is not whole in the cache .*; unset it"):
        obtain(REPO, Lines(), settings=replace(settings, offline=True))


def test_offline_with_half_a_copy(hub: ImitatedHub, settings: HubSettings) -> None:
    folder = fill_cache(settings).folder
    assert folder is not None
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="is not whole in the cache"):
        obtain(REPO, Lines(), settings=replace(settings, offline=True))


def test_no_network_and_no_copy(settings: HubSettings) -> None:
    with pytest.raises(FetchError, match=r"127\.0\.0\.1:9 cannot be reached .*; check the network and HTTPS_PROXY"):
        obtain(REPO, Lines(), settings=replace(settings, endpoint="http://127.0.0.1:9"))


def test_a_proxy_is_used(hub: ImitatedHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    close_session()  # the library's client reads the environment when it is made
    try:
        obtained = obtain(REPO, Lines(), settings=replace(settings, endpoint="http://hub.invalid"))
    finally:
        close_session()
    assert obtained.facts.weight_bytes == len(WEIGHTS)


def test_a_disk_without_room_is_noticed_before_the_weights_are_fetched(
    hub: ImitatedHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(UsageError, match=r"the weights of org/name need 1 MB on the disk of .*, which has [\d,]+ MB"):
        obtain(REPO, Lines(), settings=settings)
    assert not any("safetensors" in request for request in hub.requests)


def test_a_disk_that_fills_up_keeps_what_has_come(
    hub: ImitatedHub, settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        if os.fstat(file).st_size == len(WEIGHTS):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=r"the disk of .* is full; what was fetched is kept; free room there"):
        obtain(REPO, Lines(), settings=settings)
    monkeypatch.undo()
    hub.requests.clear()
    assert obtain(REPO, Lines(), settings=settings).facts.weight_bytes == len(WEIGHTS)
    assert not any(request.startswith("GET /cdn/") for request in hub.requests)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written(settings: HubSettings, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match=r"cannot be written .*; set HF_HOME"):
        obtain(REPO, Lines(), settings=settings)


def test_a_cache_in_place_of_a_folder(settings: HubSettings) -> None:
    settings.cache.write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*; set HF_HOME"):
        obtain(REPO, Lines(), settings=settings)


def test_a_folder_is_used_as_it_is(tmp_path: Path, settings: HubSettings) -> None:
    folder = write_model(tmp_path / "model")
    obtained = obtain(str(folder), Lines(), settings=settings)
    assert (obtained.model, obtained.served_name, obtained.folder) == (str(folder), str(folder), folder)


def test_a_token_among_the_settings(hub: ImitatedHub, settings: HubSettings) -> None:
    make_private(hub)
    assert obtain(wish_of({"model": REPO, "hf-token": "hf_right"}), Lines(), settings=settings).folder is not None


def test_settings_of_vllm(hub: ImitatedHub, settings: HubSettings, tmp_path: Path) -> None:
    other = tmp_path / "other"
    obtained = obtain(
        wish_of({"model": REPO, "revision": "main", "download-dir": str(other)}), Lines(), settings=settings
    )
    assert obtained.folder is not None
    assert obtained.folder.is_relative_to(other)
    with pytest.raises(UsageError, match=r"the model is org/name@main, and the setting revision says 'v2'"):
        obtain(wish_of({"model": f"{REPO}@main", "revision": "v2"}), Lines(), settings=settings)


def test_without_weights_none_are_fetched(hub: ImitatedHub, settings: HubSettings) -> None:
    obtained = obtain(wish_of({"model": REPO, "load-format": "dummy"}), Lines(), settings=settings)
    assert obtained.folder is not None
    assert not any("safetensors" in request for request in hub.requests)


@pytest.mark.parametrize(
    "config",
    [
        {"model": "s3://bucket/model"},
        {"model": REPO, "load-format": "runai_streamer"},
        {"model": REPO, "hf-config-path": "org/other"},
        {"model": REPO, "code-revision": "v1"},
    ],
)
def test_what_is_left_to_vllm(hub: ImitatedHub, settings: HubSettings, config: dict[str, str]) -> None:
    obtained = obtain(wish_of(config), Lines(), settings=settings)
    assert obtained == Obtained(config["model"], config["model"])
    assert not hub.requests


@pytest.mark.parametrize("text", ["a b", "org/", "/abs", "org/name@", "org/name@a@b", "-x/y", "http://host/x", ""])
def test_no_ids(text: str) -> None:
    assert parse_id(text) is None


def test_ids() -> None:
    assert str(parse_id("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    assert str(parse_id("gpt2@refs/pr/1")) == "gpt2@refs/pr/1"


_PROGRAM = """
import sys
from pathlib import Path
from dynamo_local.model.obtain import obtain
class Report:
    def step(self, text): print(text, flush=True)
obtain("org/name", Report())
"""


def test_ctrl_c_ends_a_silent_download_and_keeps_what_has_come(hub: ImitatedHub, tmp_path: Path) -> None:
    hub.stalled = True
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], env=environ, stderr=subprocess.PIPE, text=True)
    assert hub.asked_for_content.wait(30)
    etag = hub.etag("model.safetensors")
    partial = tmp_path / "hub" / "models--org--name" / "blobs" / f"{etag}.dynamo-incomplete"
    while partial.stat().st_size == 0:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    kept = partial.stat().st_size
    assert 0 < kept < len(WEIGHTS)
    hub.stalled = False
    subprocess.run([sys.executable, "-c", _PROGRAM], env=environ, timeout=60, check=True)
    assert hub.ranges == [f"bytes={kept}-"]
