import sys
import tomllib
from argparse import ArgumentParser
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import ConfigError, TaskError
from echo2.base.units import LinkShape
from echo2.cli.learner import learner_options
from echo2.cli.options import add_config_arguments, parse
from echo2.config.load import FORMER, PRESETS, load_config, option_names, parse_overrides, to_toml
from echo2.config.run import RunConfig
from echo2.tasks.registry import is_environment, make_environment_source, make_task
from echo2.tasks.task import TaskSpec

OPTIONS = Path(__file__).with_name("options.txt")


def test_list_of_options_is_a_decision() -> None:
    """A new option needs a reason that no rule could derive: add it to options.txt together with it."""
    assert option_names() == OPTIONS.read_text().split()


@pytest.mark.parametrize("preset", [None, *sorted(PRESETS)])
def test_resolved_config_reads_back_equal(preset: str | None) -> None:
    config = load_config((), preset)
    for with_descriptions in (False, True):
        assert RunConfig.model_validate(tomllib.loads(to_toml(config, with_descriptions))) == config
    config = load_config((), preset, {"worker.uplink_limit": "3.7mbit/s", "learner.emulated_link": "1e-3MB/s 0 80ms"})
    assert config.worker.uplink_limit == 3.7e6 / 8
    assert config.learner.emulated_link == LinkShape(1e3, 0.0, 0.08)
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config
    config = load_config((), preset, {"task.system_prompt": '"a\\\\ \\" \\u007f\\u0085\\u2028"'})
    assert config.task.system_prompt == 'a\\ " \x7f\x85\u2028'
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


def test_override_beats_file_beats_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('\ufeffpreset = "wan"\n[coordinator]\nport = 7\n[learner]\nlr = 3e-4\n')
    config = load_config([file], None, {"coordinator.port": "9", "run.name": "trial", "staleness.kappa": "4"})
    assert config.coordinator.host == "::"  # preset
    assert config.coordinator.port == 9  # override
    assert config.run.name == "trial"
    assert config.learner.lr == 3e-4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("learner.lr", "-1", r"learner\.lr: expected a number above 0, got -1$"),
        (
            "learner.rollouts_per_prompt",
            "5000",
            r"rollouts_per_prompt: expected a whole number from 1 to 4096, got 5000 \(a group holds at most 4096 rollouts",
        ),
        ("learner.lrr", "1", r"learner\.lrr: no such option \(did you mean learner\.lr\?\)"),
        ("learner.kappa", "1", r"learner\.kappa: no such option \(did you mean staleness\.kappa\?\)"),
        ("learner.colour", "1", r"learner\.colour: no such option \(`echo2 config show` lists them\)"),
        ("worker.uplink_limit", "300", r"worker\.uplink_limit: rate: expected a number with a unit, .*, got 300"),
        ("staleness.kappa", "9", "at most the staleness bound 4 .*got 9"),
        ("staleness.bound", "65", r"bound: expected a whole number from 0 to 64, got 65 \(0 is synchronous; beyond 64"),
        ("worker.emulated_link", "3 parsecs", r"worker\.emulated_link: expected uplink, downlink and round trip"),
        ("worker.emulated_link", "3 4parsecs 5s", r"worker\.emulated_link: rate: expected"),
        ("worker.emulated_link", "1e999mbit 1mbit 5s", r"worker\.emulated_link: rate: expected a finite number"),
        ("agent.episode_timeout", "true", r"agent\.episode_timeout: expected a number"),
        ("run.name", "../x", r"run\.name: expected 1 to 63 letters, .*, got '\.\./x'"),
        (
            "coordinator.advertise",
            "h.org:8418",
            r"coordinator\.advertise: expected a host without a port .*, got 'h\.org:8418'",
        ),
        (
            "coordinator.advertise",
            "http://h.org",
            r"coordinator\.advertise: expected a host without .*, got 'http://h\.org'",
        ),
        (
            "coordinator.port",
            "8418",
            r"coordinator: expected ports that differ .*, got \{'enrol_port': 8418, 'port': 8418, ",
        ),
        ("learner.advertise", "h.org", r"learner\.advertise: expected HOST:PORT, .*, got 'h\.org'"),
        ("learner.steps", "many", r"learner\.steps: expected a whole number of at least 1, got 'many'$"),
        ("learner.steps", "1.5", r"learner\.steps: expected a whole number of at least 1, got 1\.5$"),
        ("learner.advantage", "gpro", r"learner\.advantage: expected one of grpo, dr_grpo, .*, got 'gpro'$"),
        ("learner.sinks", '["wandbb"]', r"learner\.sinks\.0: expected one of tensorboard, .*, got 'wandbb'$"),
        ("learner.steps", "true", r"learner\.steps: expected a whole number of at least 1, got True$"),
        ("learner.drop_equal_groups", "perhaps", r"drop_equal_groups: expected true or false, got 'perhaps'$"),
        ("learner.gradient_checkpointing", "3", r"expected true or false or one of auto, selective, got 3"),
        ("learner", "3", r"learner: expected a section of options, got 3"),
        ("lerner.lr", "3", r"lerner: no such option \(did you mean \[learner\]\?\)"),
        ("worker.place", '"' + "x" * 129 + '"', r"worker\.place: expected a string of at most 128 characters, got"),
        ("worker.slots", "5000", r"worker\.slots: expected a whole number from 0 to 4096, got 5000 \(no engine"),
        ("learner.clip", "[1.1, 0.2]", r"learner\.clip\.0: expected a number above 0 and at most 1, got 1\.1"),
        ("learner.clip", "0.2", r"learner\.clip: expected a list, such as \[0\.2, 0\.28\], got 0\.2$"),
        ("sampling.stop", "x", r"sampling\.stop: expected a list, such as .* of at most 16 entries, got 'x'$"),
        ("sampling.stop", '[""]', r"sampling\.stop\.0: expected a string of 1 to 64 characters, got ''$"),
        ("task.mixture.a.weight", "0", r"a\.weight: expected a number above 0 and at most 1000000, got 0"),
        ("task.eval_sets.sums.samples", "4097", r"task\.eval_sets\.sums\.samples: .* got 4097"),
        ("learner.correction", "masked", r"learner\.correction: expected"),
        ("learner.updates_per_batch", "99", "whole groups"),
        ("worker.price_usd_per_hour", "1e7", r"price_usd_per_hour: expected a number from 0 to below 1000000"),
    ],
)
def test_bad_value_is_refused_by_name(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config((), None, {name: text})


@pytest.mark.parametrize("above", [0, 1, 4])
def test_the_gateways_port_is_none_of_the_learners(above: int) -> None:
    overrides = {"learner.port": "7000", "agent.listen": f"127.0.0.1:{7000 + above}"}
    with pytest.raises(
        ConfigError, match=r"agent\.listen: expected a port other than 7000, 7001 and 7004, which learner\.port"
    ):
        load_config((), None, overrides)


def test_a_file_whose_option_became_a_rule_loads_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[coordinator]\nport = 7\nrelay_port = 0\n[agent]\nrestarts = 0\n")
    config = load_config([file])
    assert config.coordinator.relay_port == 11 and config.agent == load_config().agent
    for name in FORMER:
        assert f"{name} = 0: no longer an option" in caplog.text and name not in option_names()


def test_a_bound_that_no_arithmetic_explains_has_its_reason() -> None:
    """Ports and shares explain themselves; whatever else ends somewhere says why there."""
    bounded = 0
    for section_name, section in RunConfig.model_fields.items():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            most = [one.le for one in field.metadata if type(one).__name__ == "Le"]
            if most and most[0] not in (1, 65535):
                bounded += 1
                assert field.json_schema_extra["why"], f"{section_name}.{name}"
    assert bounded > 5


def test_missing_file_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found nothing there"):
        load_config([tmp_path / "no.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="broken.toml: expected TOML"):
        load_config([broken])
    with pytest.raises(ConfigError, match="preset: expected one of lan, local, wan, got 'moon'"):
        load_config((), "moon")
    broken.write_text('preset = ["wan"]\n')
    with pytest.raises(ConfigError, match=r"preset: expected one of lan, local, wan, got \['wan'\]"):
        load_config([broken])


def test_overrides_are_parsed_in_both_forms() -> None:
    for name in ("2026-11-29", "20261129", "1e5"):  # a text, whatever TOML would call it
        assert load_config((), None, {"run.name": name}).run.name == name
    parsed = parse_overrides(["--learner.lr", "1e-6", "--run.name=x=y", "--worker.is-spot", "true"])
    assert parsed == {"learner.lr": "1e-6", "run.name": "x=y", "worker.is_spot": "true"}
    with pytest.raises(ConfigError, match="expected a value after --learner.lr"):
        parse_overrides(["--learner.lr"])
    with pytest.raises(ConfigError, match="expected an override"):
        parse_overrides(["lr", "1"])


TEXTS = st.sampled_from(["learner.lr", "worker.emulated_link", "run.name", "agent.episode_timeout", "task.args"])


@given(TEXTS, st.text(max_size=20))
def test_any_override_text_gives_a_config_or_a_config_error(name: str, text: str) -> None:
    try:
        load_config((), None, {name: text})
    except ConfigError as error:
        assert name.split(".", maxsplit=1)[0] in str(error)


# ---- the run files of examples/ are what the programs take, and their tasks exist

ROOT = Path(__file__).parents[3]
RUNS = sorted((ROOT / "examples" / "configs").glob("*.toml"))


def parsed(path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """As the programs take it, with its folder on the module path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    parser = ArgumentParser()
    add_config_arguments(parser)
    return parse(parser, ["--config", str(path)])[1]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_file_gives_options_and_a_task(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed(path, monkeypatch)
    assert config.run.name in path.read_text()
    made_of = learner_options(config, "", tmp_path).config  # with what "auto" means of the training step
    assert made_of.model_copy(update={"learner": config.learner}) == config
    spec = TaskSpec(config.task.name, config.task.args, seed=0)
    if config.task.name == "math":
        with pytest.raises(TaskError, match=r"data/math\.parquet"):
            make_task(spec)  # the data is yours to bring
        return
    made = make_environment_source(spec) if is_environment(spec) else make_task(spec)
    assert made.name


def test_page_lists_every_run_file() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    for path in RUNS:
        assert path.stem.removeprefix("math-qwen3") in page, path.name
