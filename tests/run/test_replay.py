"""A recorded step, computed again: the same bits on the same mesh, rounding on another, and nothing else passes."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxppo import replay as command
from jaxppo.config import Config, KLControlConfig, MeshConfig, UserError
from jaxppo.run import trainer
from jaxppo.run.recording import directory, file_hash, fingerprint, from_plain, read_batch, read_record, regroup
from jaxppo.run.replaying import replay
from jaxppo.run.trainer import train
from tests.run.world import change, make_world
from tests.tiny import pad, random_rollouts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output_dir of two steps, the second of them recorded, and its config."""
    config = make_world(tmp_path_factory.mktemp("world"))
    config = change(config, "trainer", total_training_steps=2, save_freq=-1, record_steps=(2,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot_or_say", lambda *_: None)
        train(config)
    return config


@pytest.fixture
def copy(run, tmp_path):
    """The recording, to damage."""
    shutil.copytree(directory(run.trainer.output_dir, 2), directory(tmp_path, 2))
    return tmp_path


def mesh_of(record) -> MeshConfig:
    return MeshConfig(**record.mesh)


def test_the_same_mesh_gives_the_same_bits(run):
    record = read_record(run.trainer.output_dir, 2)
    result = replay(run.trainer.output_dir, record, mesh_of(record))
    assert result.equal
    assert not result.differences
    assert result.lines() == ["step 2: the next state is the recorded one, bit for bit"]
    assert record.before != record.after


def test_another_mesh_differs_by_rounding_and_says_where(run):
    record = read_record(run.trainer.output_dir, 2)
    other = MeshConfig(data=2, fsdp=1) if record.mesh["fsdp"] != 1 else MeshConfig(data=1, fsdp=2)
    result = replay(run.trainer.output_dir, record, other)
    assert not result.equal
    assert "actor['embed']" in result.differences
    assert 0 < result.worst < 1e-2
    assert result.lines()[1].endswith(max(result.differences, key=lambda name: result.differences[name]))


def test_a_changed_byte_of_the_batch_is_refused_and_another_batch_differs(copy):
    file = directory(copy, 2) / "batch.safetensors"
    arrays = load_file(file)
    at = tuple(np.argwhere(arrays["mask"])[0])
    arrays["tokens"][at] = (arrays["tokens"][at] + 1) % 60
    save_file(arrays, file)
    record = read_record(copy, 2)
    with pytest.raises(UserError, match=r"batch.safetensors: its hash is not the recorded .* damaged"):
        replay(copy, record, mesh_of(record))
    record = dataclasses.replace(record, batch=file_hash(file))
    assert not replay(copy, record, mesh_of(record)).equal


@pytest.mark.parametrize("text", ["{", "{}", '{"step": 2, "later": 1}'])
def test_a_damaged_record_is_one_line(copy, text):
    (directory(copy, 2) / "record.json").write_text(text)
    with pytest.raises(UserError, match="record.json: the recording is damaged, or of another version"):
        read_record(copy, 2)


def test_a_changed_setting_is_noticed(copy):
    file = directory(copy, 2) / "record.json"
    plain = json.loads(file.read_text())
    plain["config"]["actor"]["lr"] *= 1.01
    file.write_text(json.dumps(plain))
    record = read_record(copy, 2)
    result = replay(copy, record, mesh_of(record))
    assert not result.equal
    assert all(name.startswith("actor") for name in result.differences)


def test_a_damaged_state_is_refused(copy):
    file = directory(copy, 2) / "record.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"before": "0" * 64}))
    record = read_record(copy, 2)
    with pytest.raises(UserError, match="before: its hash is not the recorded 0000.* the recording is damaged"):
        replay(copy, record, mesh_of(record))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "1"], "step 1 was not recorded; recorded are 2"),
        (["--step", "2", "--actor.lr", "1"], "--actor.lr: a replay keeps the recorded settings; only --mesh"),
        (["--step", "2", "--mesh.fdsp", "1"], "--mesh.fdsp: no such flag (did you mean --mesh.fsdp?)"),
    ],
)
def test_mistakes_are_one_line(run, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        command.main([run.trainer.output_dir, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_without_recordings(tmp_path):
    with pytest.raises(UserError, match="step 3 was not recorded; none is: see trainer.record_steps"):
        read_record(tmp_path, 3)


def test_a_recording_changes_nothing_and_the_batch_is_the_hosts(run, tmp_path):
    plain = change(run, "trainer", record_steps=(), output_dir=str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot_or_say", lambda *_: None)
        state = train(plain)
    record = read_record(run.trainer.output_dir, 2)
    assert fingerprint(state) == record.after
    batch = read_batch(run.trainer.output_dir, record)
    assert batch.num_sequences.shape == ()
    assert batch.mask.dtype == bool


def test_a_configuration_survives_json():
    config = Config(algorithm=dataclasses.replace(Config().algorithm, kl_ctrl=KLControlConfig(type="adaptive")))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_files=("a", "b")))
    assert from_plain(Config, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(UserError, match="Config has no later: it was recorded by another version"):
        from_plain(Config, {"later": 1})


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_regrouped_rows_keep_their_order_and_their_count(rows):
    batch = pad(random_rollouts(6), 10, rows=2, minibatches=2)
    found = regroup(batch, rows)
    for name in ("tokens", "mask", "scores"):
        old, new = (np.asarray(getattr(b, name)).reshape(2, -1, 10) for b in (batch, found))
        np.testing.assert_array_equal(new[:, : old.shape[1]], old)
        assert not new[:, old.shape[1] :].any()
    assert found.tokens.shape[2] == rows
    used = [int(np.any(np.asarray(found.segment_ids)[m], axis=(1, 2)).sum()) for m in range(2)]
    assert used == found.num_microbatches.tolist()
    assert jax.tree.structure(found) == jax.tree.structure(batch)
