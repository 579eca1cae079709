"""`echo2 offers` as its user sees it: gpuhunt's own reader over a folder of catalogues, kept prices and their age, no network."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo2.cli.main import main
from echo2.coordinator.money.market import built_in_catalogue, keep, kept_file, typical
from tests.patience import WAIT_S

HEAD = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,"
    "gpu_vendor,flags,cpu_arch,provider_data"
)
ROWS = {
    "runpod": (
        "4090,eu-cz-1,0.34,16,62,1,RTX4090,24,False,100,nvidia,,x86,{}",
        "4090,eu-cz-1,0.20,16,62,1,RTX4090,24,True,100,nvidia,,x86,{}",
        "mi300,eu-ro-1,2.50,24,280,1,MI300X,192,False,100,amd,,x86,{}",
    ),
    "aws": (
        "p5.48xlarge,us-east-1,55.04,192,2048,8,H100,80,False,,nvidia,,x86,{}",
        "g4dn.xlarge,us-east-1,0.526,4,16,1,T4,16,False,,nvidia,,x86,{}",
    ),
}
PROVIDERS = ("aws", "azure", "verda", "gcp", "lambdalabs", "nebius", "oci", "runpod", "cloudrift")
MODEL = ("--model.path", "Qwen/Qwen3-4B", "--sampling.max_prompt_tokens", "512", "--sampling.max_new_tokens", "2048")

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # gpuhunt leaves files open


@pytest.fixture
def market(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "catalogues"
    folder.mkdir()
    for provider in PROVIDERS:
        (folder / f"{provider}.csv").write_text("\n".join((HEAD, *ROWS.get(provider, ()))) + "\n")
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["offers", *arguments, *MODEL, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prices_are_fetched_ranked_and_kept_with_their_age(market: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys)
    assert [(one["kind"], one["offer"]["is_spot"]) for one in found] == [
        ("RTX4090", True), ("RTX4090", False), ("H100", False), ("", False),
    ]  # fmt: skip
    assert found[0]["usd_per_million"] < found[1]["usd_per_million"] and "T4" in found[3]["refusal"]
    kept = kept_file()
    assert len(json.loads(kept.read_text())["offers"]) == 4, "what no engine of ours runs on is not kept"
    for one in market.glob("*.csv"):
        one.unlink()
    told_at = json.loads(kept.read_text())
    kept.write_text(json.dumps({**told_at, "fetched_at": told_at["fetched_at"] - 7200}))
    assert main(["offers", *MODEL]) == 0
    shown = capsys.readouterr()
    assert "4 offers from gpuhunt, fetched 2 h ago" in shown.out and "0.200 spot" in shown.out
    assert shown.out.count("RTX4090") == 1, "one row a kind of GPU: the spot one is cheaper"
    assert main(["offers", *MODEL, "--refresh"]) != 0
    assert "expected a catalogue from gpuhunt" in capsys.readouterr().err
    kept.write_text("{")
    assert main(["offers", *MODEL, "--offline"]) != 0 and str(kept) in capsys.readouterr().err


def test_filters_and_sorts(market: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["offer"]["provider"] for one in told(capsys, "--provider", "AWS", "--gpu", "H100")] == ["aws"]
    assert told(capsys, "--sort", "speed")[0]["kind"] == "H100"
    assert len(told(capsys, "--rows", "1")) == 1
    assert all(not one["offer"]["is_spot"] for one in told(capsys, "--on-demand"))
    assert main(["offers", *MODEL, "--region", "mars"]) != 0
    assert "expected one that passes the filters, none of 4 does" in capsys.readouterr().err


def test_typical_prices_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["offers", *MODEL, "--offline"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines()) and "tokens/s   USD per million tokens" in shown
    assert "nobody offers them" in shown and "RTX4090" in shown and not kept_file().exists()


SHIPPED = Path(__file__).parents[3] / "examples" / "offers" / "typical-mid-2026.json"


def test_what_is_recorded_can_be_ranked_elsewhere(
    market: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recorded.json"
    fresh = told(capsys, "--record", str(file))
    kept_file().unlink()
    assert told(capsys, "--recorded", str(file)) == fresh and not kept_file().exists()
    assert main(["offers", *MODEL, "--recorded", str(tmp_path / "none.json")]) != 0
    assert "expected a recorded catalogue at" in capsys.readouterr().err
    again = tmp_path / SHIPPED.name
    keep(typical(built_in_catalogue()), again)
    assert SHIPPED.read_text() == again.read_text(), f"write it anew: cp {again} {SHIPPED}"
    assert main(["offers", *MODEL, "--recorded", str(SHIPPED), "--gpu", "H100", "--rows", "0"]) == 0
    shown = capsys.readouterr().out
    assert "assumptions, nobody offers them" in shown and "8 x H100" in shown and "fetched" not in shown


def test_the_commands_of_the_page(
    market: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first in a process of its own, as it stands there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[model]\npath = "Qwen/Qwen3-4B"\n')
    command = [Path(sys.executable).with_name("echo2"), "offers", "run.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "RTX4090" in done.stdout and "H100" in done.stdout
    for extra in (["--gpu", "RTX4090", "--spot"], ["--record", "prices.json"], ["--recorded", "prices.json"]):
        assert main(["offers", "run.toml", *extra]) == 0
        shown = capsys.readouterr().out
        assert "RTX4090" in shown and "spot" in shown and ("H100" in shown) is not ("--gpu" in extra)
