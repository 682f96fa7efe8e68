"""What may not change an update: padding, packing, row order, microbatches; what lr = 0 leaves alone."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxppo.config import Config, MeshConfig
from jaxppo.parallel.mesh import make_mesh, place_rows
from jaxppo.step.init import init_state, state_shardings
from jaxppo.step.packing import pack
from jaxppo.step.score import make_score_step
from jaxppo.step.state import Experience, PackedBatch, TrainState
from jaxppo.step.update import gradient as minibatch_gradient
from jaxppo.step.update import make_actor_loss, make_critic_loss, make_update_step
from tests.tiny import critic_params, pad, place_state, random_rollouts, tiny_config, tiny_model


class Setup:
    """One PPO step's pieces, in float64 on one device: state, experience and the functions of both."""

    def __init__(self, batch: PackedBatch, config: Config) -> None:
        self.config = config
        self.mesh = make_mesh(MeshConfig(data=1, fsdp=1), jax.devices()[:1])
        self.model = tiny_model(dtype="float64")
        state = init_state(config, self.model.params, critic_params(self.model), jax.random.key(3))
        shardings = state_shardings(config, self.model, self.model, self.mesh)
        self.state = place_state(state, shardings)
        reference = jax.device_put(tiny_model(seed=7, dtype="float64").params, shardings.actor)
        score = make_score_step(config, self.model, self.mesh)
        self.experience = score(self.state, reference, place_rows(batch, self.mesh))

    def gradients(self) -> dict[str, Any]:
        """Of the first minibatch, for both networks."""
        actor, critic = make_actor_loss(self.config, self.model), make_critic_loss(self.config, self.model)

        @jax.jit
        def both(state: TrainState, experience: Experience) -> dict[str, Any]:
            return {
                "actor": minibatch_gradient(actor, state.actor, experience, 0)[0],
                "critic": minibatch_gradient(critic, state.critic, experience, 0)[0],
            }

        return both(self.state, self.experience)

    def step(self) -> tuple[dict[str, Any], TrainState, dict[str, Any]]:
        """(gradients, next state, metrics)."""
        gradients = self.gradients()
        state, metrics = make_update_step(self.config, self.model, self.mesh)(self.state, self.experience)
        return gradients, state, metrics


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Each leaf to `tolerance` of its own largest element."""
    flat, _ = jax.tree.flatten_with_path(expected)
    for (path, want), got in zip(flat, jax.tree.leaves(actual), strict=True):
        want, got = np.asarray(want), np.asarray(got)
        scale = max(float(np.abs(want).max()), 1e-3)
        np.testing.assert_allclose(got, want, atol=tolerance * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


def assert_same_step(actual: tuple, expected: tuple, tolerance: float) -> None:
    """Gradients, metrics and the next state agree; Adam divides by |g|, so parameters get a looser bound."""
    assert_close(actual[0], expected[0], tolerance)
    assert actual[2].keys() == expected[2].keys()
    assert_close(actual[2], expected[2], 10 * tolerance)
    for network in ("actor", "critic"):
        assert_close(getattr(actual[1], network), getattr(expected[1], network), 100 * tolerance)
    assert_close(actual[1].kl, expected[1].kl, 1e-6)


@pytest.fixture(scope="module")
def config() -> Config:
    return tiny_config(ppo_epochs=2, entropy_coeff=0.01)


@pytest.fixture(scope="module")
def padded(config) -> tuple:
    """The oracle: one sequence a row, everything in float64 on one device."""
    with jax.enable_x64(True):
        return Setup(pad(random_rollouts(), 10, rows=6, minibatches=2), config).step()


LAYOUTS = {
    "wider padding, microbatches of 1 row": lambda r: pad(r, 23, rows=1, minibatches=2),
    "packed, 8 rows of which some are dummies": lambda r: pack(r, 11, rows=8, minibatches=2, longest=10),
    "rows in another order": lambda r: pad(r[5::-1] + r[:5:-1], 10, rows=3, minibatches=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_change_the_gradients(layout, config, padded):
    with jax.enable_x64(True):
        found = Setup(LAYOUTS[layout](random_rollouts()), config)
        assert_close(found.gradients(), padded[0], 1e-12)
        for name, value in found.experience.metrics.items():
            np.testing.assert_allclose(value, padded[2][name], atol=1e-11, err_msg=name)


def test_packing_does_not_change_the_whole_step(config, padded):
    with jax.enable_x64(True):
        packed = pack(random_rollouts(), 20, rows=1, minibatches=2, longest=10)
        assert_same_step(Setup(packed, config).step(), padded, 1e-12)


def test_means_over_sequences_are_free_of_the_packing_too(config):
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, loss_agg_mode="seq-mean-token-mean"))
    with jax.enable_x64(True):
        expected = Setup(pad(random_rollouts(), 10, rows=6, minibatches=2), config)
        actual = Setup(pack(random_rollouts(), 20, rows=1, minibatches=2, longest=10), config)
        assert_close(actual.gradients(), expected.gradients(), 1e-12)
        assert_close(actual.experience.metrics["actor/entropy"], expected.experience.metrics["actor/entropy"], 1e-12)
