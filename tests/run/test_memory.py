"""What rollout.offload names is in host memory between updates, and comes back as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.rl.kl import FixedKL
from jaxppo.run.memory import bring_back, memory_metrics, send_away
from jaxppo.step.state import TrainState


def make_state():
    return TrainState(
        actor={"w": jnp.ones(3)},
        critic={"w": 2 * jnp.ones(3)},
        actor_opt={"m": 3 * jnp.ones(3)},
        critic_opt={"m": 4 * jnp.ones(3)},
        kl=FixedKL(0.1).init(),
        step=jnp.int32(5),
        key=jax.random.key(0),
    )


@pytest.mark.parametrize(
    ("offload", "moved"),
    [
        ((), set()),
        (("reference",), set()),
        (("optimizer",), {"actor_opt", "critic_opt"}),
        (("critic", "optimizer"), {"critic", "actor_opt", "critic_opt"}),
    ],
)
def test_the_named_parts_go_and_come_back(offload, moved):
    state, networks = make_state(), ("actor", "critic", "actor_opt", "critic_opt")
    before = {name: jax.tree.map(np.asarray, getattr(state, name)) for name in networks}
    away = send_away(state, offload)
    kinds = {name: jax.tree.leaves(getattr(away, name))[0].sharding.memory_kind for name in networks}
    assert {name for name, kind in kinds.items() if kind == "pinned_host"} == moved
    back = bring_back(away, offload)
    for name in networks:
        jax.tree.map(np.testing.assert_array_equal, getattr(back, name), before[name])
        leaf = jax.tree.leaves(getattr(back, name))[0]
        assert leaf.sharding.memory_kind == jax.devices()[0].default_memory().kind


def test_without_a_gpu_there_is_nothing_to_report():
    assert memory_metrics("gen") == {}
