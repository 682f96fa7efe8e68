"""No mesh changes a PPO step: gradients, metrics and the next state are those of one device."""

import dataclasses
from contextlib import closing
from typing import Any

import jax
import numpy as np
import pytest

from jaxppo.config import MeshConfig
from jaxppo.parallel.mesh import make_mesh, place_rows, replicated, row_sharding
from jaxppo.run.checkpoint import Checkpoints, restore
from jaxppo.step.init import init_state, state_shardings
from jaxppo.step.packing import pack
from jaxppo.step.score import make_score_step
from jaxppo.step.state import Experience, TrainState
from jaxppo.step.update import make_update_step
from tests.tiny import critic_params, on_mesh, place_state, random_rollouts, tiny_config, tiny_model

CONFIG = tiny_config(ppo_mini_batch_size=12, entropy_coeff=0.01)
ONE = (1, 1, 1, 1)
MESHES = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2)]


class World:
    """A mesh (data, fsdp, context, tensor) with a model, and what one step makes there."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        data, fsdp, context, tensor = shape
        config = MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor)
        self.mesh = make_mesh(config, jax.devices()[: data * fsdp * context * tensor])
        self.model = dataclasses.replace(on_mesh(tiny_model(dtype=dtype), self.mesh), remat="none")
        self.shardings = state_shardings(CONFIG, self.model, self.model, self.mesh)
        self.update = make_update_step(CONFIG, self.model, self.mesh)

    def state(self) -> TrainState:
        state = init_state(CONFIG, self.model.params, critic_params(self.model), jax.random.key(3))
        return place_state(state, self.shardings)

    def experience(self) -> Experience:
        """5 packed rows in 8: where rows are split 4 or 8 ways, a device has no token at all."""
        batch = pack(random_rollouts(), 20, rows=8, longest=10)
        assert batch.mask.any((1, 3)).sum() <= 6
        reference = jax.device_put(tiny_model(7, str(self.model.dtype)).params, self.shardings.actor)
        score = make_score_step(CONFIG, self.model, self.mesh)
        return jax.block_until_ready(score(self.state(), reference, place_rows(batch, self.mesh)))

    def step(self) -> dict[str, Any]:
        self.experienced = self.experience()
        # virtual CPU devices share few threads: another program beside one with collectives can block it for ever
        self.next_state, metrics = jax.block_until_ready(self.update(self.state(), self.experienced))
        return as_dict(self.next_state) | {"metrics": metrics}


def as_dict(state: TrainState) -> dict[str, Any]:
    """Adam's first moment after one step is the gradient, clipped, times 1 - beta."""
    opts = {"actor_opt": state.actor_opt, "critic_opt": state.critic_opt}
    return opts | {"actor": state.actor, "critic": state.critic, "kl": state.kl, "step": state.step}


def differences(actual: Any, expected: Any) -> dict[str, float]:
    """Of each leaf, relative to its largest element; of metrics, which are differences of numbers near 4, to 0.1."""
    flat, _ = jax.tree.flatten_with_path(expected)
    found = {}
    for (path, want), got in zip(flat, jax.tree.leaves(actual), strict=True):
        name, want, got = jax.tree_util.keystr(path), np.asarray(want), np.asarray(got)
        floor = 0.1 if "metrics" in name else 1e-3
        found[name] = float(np.abs(got - want).max() / max(np.abs(want).max(), floor))
    return found


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    assert {name: x for name, x in differences(actual, expected).items() if not x <= tolerance} == {}


@pytest.fixture(scope="module")
def worlds() -> dict[tuple[int, ...], World]:
    """In float64."""
    with jax.enable_x64(True):
        return {shape: World(shape, "float64") for shape in [ONE, *MESHES]}


@pytest.fixture(scope="module")
def one(worlds) -> dict[str, Any]:
    with jax.enable_x64(True):
        return worlds[ONE].step()


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_does_not_change_the_step(shape, worlds, one):
    with jax.enable_x64(True):
        assert_same(worlds[shape].step(), one, 1e-11)


@pytest.mark.slow
def test_in_float32():
    # 4 devices: with 8 virtual ones on 2 cores the float32 program was seen to block for ever
    assert_same(World((1, 2, 1, 2), "float32").step(), World(ONE, "float32").step(), 1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_8_devices_goes_on_on_2_and_on_1(worlds, one, tmp_path):
    def restored_step(world: World) -> dict[str, Any]:
        layouts = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), eight.next_state, world.shardings
        )
        state = restore(tmp_path / "checkpoints" / "step_1", layouts).state
        rows, everywhere = row_sharding(world.mesh, 2), replicated(world.mesh)
        experience = jax.tree.map(lambda x: jax.device_put(x, rows if x.ndim == 4 else everywhere), eight.experienced)
        return as_dict(jax.block_until_ready(world.update(state, experience))[0])

    with jax.enable_x64(True):
        eight = worlds[1, 2, 2, 2]
        eight.step()
        with closing(Checkpoints(str(tmp_path), None)) as checkpoints:
            checkpoints.save(eight.next_state, {}, {}, CONFIG, "")
        expected = restored_step(eight)
        assert_same(restored_step(worlds[ONE]), expected, 1e-11)
        assert_same(restored_step(World((1, 2, 1, 1), "float64")), expected, 1e-11)
