import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import OptimizerConfig
from jaxppo.step.optimizer import learning_rate, make_optimizer


def test_two_steps_by_hand():
    """AdamW as torch.optim.AdamW: p <- p (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps), gradients clipped before."""
    config = OptimizerConfig(lr=0.1, betas=(0.9, 0.999), weight_decay=0.01, grad_clip=1.0)
    tx = make_optimizer(config)
    params = {"w": jnp.array([1.0, -2.0])}
    state = tx.init(params)
    m = v = np.zeros(2)
    expected = np.array([1.0, -2.0])
    for t, gradient in enumerate([np.array([0.3, -0.4]), np.array([3.0, 4.0])], 1):
        clipped = gradient * min(1.0, 1.0 / np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * clipped, 0.999 * v + 0.001 * clipped**2
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        expected = expected * (1 - 0.1 * 0.01) - 0.1 * step
        direction, state = tx.update({"w": jnp.array(gradient, jnp.float32)}, state, params)
        params = {"w": params["w"] - 0.1 * direction["w"]}
        np.testing.assert_allclose(params["w"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "rates"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"lr_scheduler": "cosine"}, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0]),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1}, [0.0, 0.5, 1.0, 0.55, 0.1]),
    ],
)
def test_the_rate_follows_the_ppo_step(change, rates):
    config = dataclasses.replace(OptimizerConfig(lr=1.0), **change)
    found = [float(learning_rate(config, jnp.int32(step), 4)) for step in range(5)]
    np.testing.assert_allclose(found, rates, atol=1e-6)
