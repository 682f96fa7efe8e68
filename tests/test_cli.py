"""The command line: a config file, overrides, and one line with exit status 2 for every mistake."""

import dataclasses
from operator import attrgetter
from pathlib import Path

import pytest

from jaxppo.checks import settings
from jaxppo.cli import load_config, to_flags
from jaxppo.config import Config, UserError
from jaxppo.train import main
from tests.run.world import change, make_world, rows, write_rows


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return make_world(tmp_path_factory.mktemp("world"))


def write(config: Config, folder: Path) -> str:
    path = folder / "settings.py"
    path.write_text(f"from jaxppo.config import *\n\n\ndef config():\n    return {config!r}\n")
    return str(path)


@pytest.fixture
def fails(config, tmp_path, capsys):
    """Runs the command with the world's config and overrides; gives back its one line on stderr."""

    def run(*overrides: str, given: Config = config) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["--config", write(given, tmp_path), "--trainer.output-dir", str(tmp_path / "run"), *overrides])
        assert stopped.value.code == 2
        output = capsys.readouterr().err
        assert "Traceback" not in output
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, output
        return lines[0]

    return run


def test_a_file_gives_defaults_and_flags_override_them(config, tmp_path):
    path = write(config, tmp_path)
    assert load_config([f"--config={path}"]) == config
    got = load_config(["--actor.lr", "0.5", "--config", path, "--algorithm.kl-ctrl.target_kl", "0.25"])
    assert got.actor == dataclasses.replace(config.actor, lr=0.5)
    assert got.algorithm.kl_ctrl.target_kl == 0.25
    assert got.data == config.data


def test_an_unknown_key_gets_a_suggestion(config, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--config", write(config, tmp_path), "--algorithm.kl-ctrl.target-kll", "0.1"])
    assert stopped.value.code == 2
    output = "".join(capsys.readouterr())
    assert "--algorithm.kl-ctrl.target-kl" in output
    assert "Traceback" not in output


def test_help_needs_no_file(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert "--algorithm.kl-ctrl.target-kl FLOAT" in output
    assert "Nats per token" in output


def test_missing_files_name_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gsm8k.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"--config is missing: .* configs/gsm8k\.py"):
        load_config([])
    with pytest.raises(UserError, match=r"--config is missing"):
        load_config(["--config"])
    for typo in ("configs/gsm8.py", "config/gsm8k.py", "gsm8k.py"):
        with pytest.raises(UserError, match=rf"--config {typo}: no such file \(did you mean configs/gsm8k\.py\?\)"):
            load_config(["--config", typo])
    with pytest.raises(UserError, match=r"must define config\(\) -> jaxppo\.config\.Config"):
        load_config(["--config", "configs/gsm8k.py"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--data.train-batch-size", "10", "--actor.ppo-mini-batch-size", "4"), "valid sizes are 1, 2, 5, 10"),
        (("--actor.use-kl-loss",), "algorithm.use_kl_in_reward and actor.use_kl_loss are both true"),
        (("--algorithm.kl-ctrl.target-kl", "0"), "algorithm.kl_ctrl.target_kl = 0.0: valid is a number > 0"),
        (("--algorithm.kl-ctrl.horizon", "-1"), "algorithm.kl_ctrl.horizon = -1: valid is a number > 0"),
        (
            ("--mesh.data", "3"),
            "mesh.data = 3, mesh.fsdp = -1, mesh.context = 1, mesh.tensor = 1: the axes must",
        ),
        (
            ("--mesh.fsdp", "1", "--mesh.tensor", "8"),
            "mesh.tensor = 8 must divide 4, the number of attention heads",
        ),
        (("--model.path", "/nowhere/at/all"), "model.path = /nowhere/at/all"),
        (("--model.init", "pretrained"), "no *.safetensors"),
        (("--data.train-files", "/nowhere.parquet"), "data.train_files: /nowhere.parquet: no such file"),
        (("--data.val-files", "/nowhere.parquet"), "data.val_files: /nowhere.parquet: no such file"),
        (("--data.prompt-key", "question"), "no column data.prompt_key = 'question'; the columns are ability"),
        (("--data.max-prompt-length", "3"), "data.max_prompt_length = 3"),
        (
            ("--data.max-response-length", "125", "--actor.row-length", "129", "--actor.max-tokens-per-device", "129"),
            "data.max_prompt_length = 4 and data.max_response_length = 125: together at most the 128 positions of ",
        ),
        (
            ("--data.max-prompt-length", "3", "--data.filter-overlong-prompts"),
            "no prompt is left (10 longer than data.max_prompt_length = 3",
        ),
        (
            ("--data.train-batch-size", "16", "--actor.ppo-mini-batch-size", "4"),
            "data.train_batch_size = 16, but data.train_files have only 10 prompts",
        ),
        (("--reward.function", "gsm8"), "did you mean gsm8k?"),
        (("--reward.function", "/nowhere.py:score"), "reward.function = /nowhere.py:score: no file"),
        (("--trainer.resume", "/nowhere"), "trainer.resume = /nowhere: valid is auto, never, or the path"),
    ],
)
def test_bad_settings(fails, overrides, message):
    assert message in fails(*overrides)


def test_an_unwritable_output_directory(fails, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fails("--trainer.output-dir", str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
    ],
)
def test_a_row_without_a_prompt_is_named(fails, config, tmp_path, row, message):
    table = rows(10)
    table[7] |= row
    file = write_rows(tmp_path / "bad.parquet", table)
    line = fails(given=change(config, "data", train_files=(file,)))
    assert f"data.train_files: {file}, row 7: {message}" in line


def test_a_config_file_that_raises_is_named_in_one_line(tmp_path):
    from jaxppo.cli import read_config_file
    from jaxppo.config import UserError

    file = tmp_path / "mine.py"
    file.write_text("from jaxppo.config import ActorConfig\n\n\ndef config():\n    return ActorConfig(lrr=1)\n")
    with pytest.raises(UserError, match=r"mine.py: TypeError: .*lrr"):
        read_config_file(file)


def test_a_config_files_wrong_type_is_named_in_one_line(fails, config):
    line = fails(given=change(config, "data", train_files="train.parquet"))
    assert "settings.py: data.train_files = 'train.parquet': valid is a tuple" in line


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("--actor.use-kl-loss", "--actor.use-kl-loss"),
        ("--actor.use-kl-loss True --actor.lr 1", "--actor.use-kl-loss --actor.lr 1"),
        ("--actor.use_kl_loss=true", "--actor.use-kl-loss"),
        ("--data.shuffle False", "--data.no-shuffle"),
        ("--data.shuffle=false --help", "--data.no-shuffle --help"),
        ("--data.no-shuffle --rollout.top-k -1", "--data.no-shuffle --rollout.top-k -1"),
        ("--actor.betas 0.8 0.9 --actor.lr=1e-4", "--actor.betas 0.8 0.9 --actor.lr=1e-4"),
        ("--data.train_files a.parquet lr=1/b.parquet", "--data.train-files a.parquet lr=1/b.parquet"),
        ("--trainer.output-dir runs/lr=1", "--trainer.output-dir runs/lr=1"),
        ("--trainer.output_dir=runs/trainer.output_dir", "--trainer.output-dir=runs/trainer.output_dir"),
        ("--actor.row_length=None --data.val-files", "--actor.row-length=None --data.val-files"),
        ("--rollout.offload critic reference", "--rollout.offload critic reference"),
    ],
)
def test_other_tools_spellings_of_a_flag_are_read(given, flags):
    assert to_flags(given.split()) == flags.split()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--confg configs/quickstart.py", "--confg: no such flag (did you mean --config?)"),
        ("--actor.lrr=1", "--actor.lrr: no such flag (did you mean --actor.lr?)"),
        ("--lr 1", "--lr: no such flag (did you mean --actor.lr or --critic.lr?)"),
        ("--actor.use-kl-loss maybe", "maybe: settings are written as --section.setting VALUE"),
        ("--actor.use-kl-loss=maybe", "--actor.use-kl-loss maybe: valid is True or False"),
        ("--data.no-shuffle True", "True: settings are written as --section.setting VALUE"),
        ("--actor.lr abc", "--actor.lr abc: valid is a number"),
        ("--actor.lr --actor.betas 0.9 0.9", "--actor.lr: valid is a number"),
        ("--actor.betas 0.9", "--actor.betas 0.9: valid is a tuple of 2, each a number"),
        ("--actor.row-length=1.5", "--actor.row-length 1.5: valid is an integer of 32 bits or None"),
        ("--model.dtype float3", "--model.dtype float3: valid is bfloat16, float32 (did you mean float32?)"),
        ("--data.train-files=a.parquet b.parquet", "b.parquet: settings are written as --section.setting VALUE"),
        ("actor.lr=1e-4", "actor.lr=1e-4: write --actor.lr 1e-4"),
        ("+actor.use_kl_loss=True", "+actor.use_kl_loss=True: write --actor.use-kl-loss True"),
        ("--data.train-files a.parquet actor.lr=1e-4", "actor.lr=1e-4: write --actor.lr 1e-4"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4: settings are written as --section.setting VALUE "
            "(did you mean --actor.ppo-mini-batch-size?)",
        ),
    ],
)
def test_what_is_no_flag_is_named_with_the_right_spelling(given, message):
    with pytest.raises(UserError) as caught:
        load_config(given.split())
    assert str(caught.value) == message


def test_a_boolean_override_counts(config, tmp_path):
    path = write(config, tmp_path)
    assert load_config(["--config", path, "--data.shuffle", "False"]).data.shuffle is False
    assert load_config(["--config", path, "--actor.use_kl_loss", "true"]).actor.use_kl_loss is True


def test_every_setting_can_be_given_as_a_flag(config, tmp_path):
    """All at once, each with the value that it has."""
    flags = []
    for name in settings():
        value = attrgetter(name)(config)
        flags += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    assert load_config(["--config", write(config, tmp_path), *flags]) == config
