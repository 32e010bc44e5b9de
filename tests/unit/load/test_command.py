"""The command line of `dynamo load`: refused options, and the time that its help takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.cli.main import run
from dynamo_local.load.asked import Asked

NOBODY = "http://127.0.0.1:1"


def test_the_help_imports_nothing_heavy() -> None:
    script = """
import sys
from dynamo_local.cli.main import run
assert run(["load", "--help"]) == 0 and run(["load", "compare", "--help"]) == 0
print(sorted({"asyncio", "msgspec", "ssl"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "sine:1-10:60s" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "no load named; write --rate 5, --trace FILE or --concurrency 8"),
        (["--rate=5", "--concurrency=2"], "--rate and --concurrency exclude each other"),
        (["--rate=5", "--speed=2"], "--speed does not go with this kind of load; they belong to --trace"),
        (["--trace=/no/such/trace", "--input=5"], "--input does not go with this kind of load"),
        (["--trace=/no/such/trace"], "cannot read /no/such/trace"),
        (["--rate=fast"], "is not a number"),
        (["--rate=5", "--input=0"], "--input must be a whole number"),
        (["--rate=5", "--duration=5y"], "'5y' is not a duration"),
        (["--rate=5", "--duration=5s", "--warmup=5s"], "nothing is left after the warm-up"),
        (["--rate=5", "--prefix-groups=2"], "--prefix-groups goes with --prefix-share only"),
        (["--rate=5", "--slo=speed=5"], "'speed=5' is not an objective"),
        (["--rate=5", "--vocab=9-5"], "'9-5' is not a range"),
        (["--rate=5", "--body=[]"], "--body: Expected `object`"),
        (["--rate=5", "--body={"], "--body"),
        (["--rate=5", "--url=localhost:8000"], "is not the address of an API"),
        (["--rate=5", "--url=http://me:secret@h"], "the address holds a password"),
        (["--rate=5", "--url=http://h:99999"], "is not an address"),
        (["--rate=5", f"--url=http://{'h' * 64}"], "is not an address"),
        (["--rate=5", "--api-key-file=/no/such/key"], "cannot read the API key in /no/such/key"),
        (["--rate=5", "--json=/no/such/folder/a.json"], "there is no folder /no/such/folder"),
        (["compare", "/no/such/a.json", "/no/such/b.json"], "cannot read /no/such/a.json"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [] if arguments[:1] == ["compare"] or any("--url" in each for each in arguments) else ["--url", NOBODY]
    assert run(["load", *place, *arguments]) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["load", "--rate=5", "--url", NOBODY]) == 1
    assert "cannot connect" in capsys.readouterr().err


def test_the_key_comes_from_its_file_before_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("\nfirst \nsecond\n")
    environ = {"OPENAI_API_KEY": "other"}
    assert Asked(NOBODY, rate="5", api_key_file=path).settings(environ).endpoint.key == "first"
    assert Asked(NOBODY, rate="5").settings(environ).endpoint.key == "other"
    assert Asked(NOBODY, rate="5").settings({}).endpoint.key is None


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://api.example.com/models/v1", "https://api.example.com:443/models"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses(url: str, seen: str) -> None:
    endpoint = Asked(url, rate="5").settings({}).endpoint
    assert endpoint.url == seen
    assert endpoint.request("GET", "/v1/models").startswith(b"GET ")


def test_a_trace_is_cut_to_measure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{second:02},900,{second + 1}\n" for second in range(60))
    )
    settings = Asked(NOBODY, trace=path, speed=2.0, duration="10s", max_input=500, max_output=15).settings({})
    planned = list(settings.load.requests)
    assert len(planned) == 20
    assert planned[-1].at_s == 9.5
    assert settings.load.longest == 515
    assert settings.load.duration_s == 10.0
    assert str(path.parent) not in str(settings.told)
    # The trace ends before the duration: what follows is no time of sending.
    assert Asked(NOBODY, trace=path, duration="100s").settings({}).load.duration_s is None
