"""Every estimator with every policy loss takes a real step on the tiny model; what must not change their advantages."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import Config, MeshConfig, PolicyLossConfig, RolloutCorrectionConfig
from jaxppo.config_algorithm import AdvantageEstimator
from jaxppo.parallel.mesh import make_mesh, place_rows
from jaxppo.step.init import init_state
from jaxppo.step.optimizer import make_optimizer
from jaxppo.step.packing import pack
from jaxppo.step.policy import choose_tokens
from jaxppo.step.score import make_experience, make_score_step, score_energy
from jaxppo.step.state import Experience
from jaxppo.step.update import make_actor_loss, make_update_step, optimize
from tests.tiny import critic_params, pad, random_rollouts, tiny_config, tiny_model

pytestmark = pytest.mark.slow
ESTIMATORS = typing.get_args(AdvantageEstimator)
LOSSES = typing.get_args(typing.get_type_hints(PolicyLossConfig)["loss_mode"])


def family_config(estimator: str, mode: str = "vanilla") -> Config:
    """Bounds of the covariance that the tiny model's tokens lie within."""
    loss = PolicyLossConfig(loss_mode=mode, clip_cov_lb=0.0, clip_cov_ub=100.0, clip_cov_ratio=0.1, kl_cov_ratio=0.1)
    config = tiny_config(loss_agg_mode="seq-mean-token-mean", policy_loss=loss)
    return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, adv_estimator=estimator))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=1, fsdp=1), jax.devices()[:1])


@pytest.fixture(scope="module")
def experiences(model, mesh) -> dict[str, Experience]:
    """The tiny model's own scores, once for all estimators, as the scoring of the one that needs most gives them."""
    config = family_config("optimal_token_baseline")
    batch = jax.tree.map(jnp.asarray, pack(random_rollouts(), 20, rows=1, minibatches=2, longest=10))
    state = init_state(config, model.params, critic_params(model), jax.random.key(0))
    assert state.critic is None
    assert state.critic_opt is None
    scored = make_score_step(config, model, mesh)(state, tiny_model(5).params, batch)

    @jax.jit
    def others(old_logp, ref_logp):
        """With values of 0 where there is a critic."""
        zeros = jnp.zeros_like(old_logp)
        return {
            name: make_experience(
                family_config(name),
                jnp.float32(0.05),
                batch,
                old_logp,
                ref_logp,
                zeros if name == "gae" else None,
                zeros,
            )
            for name in ESTIMATORS
            if name != "optimal_token_baseline"
        }

    return {**others(scored.old_logp, scored.ref_logp), "optimal_token_baseline": scored}


@pytest.mark.parametrize("mode", LOSSES)
def test_every_estimator_steps_with_every_loss(mode, model, experiences):
    """An actor's two optimizer steps, the second off policy; the programs are one a loss and one an estimator."""
    config = family_config("grpo", mode)
    loss, tx = make_actor_loss(config, model), make_optimizer(config.actor)
    step = jax.jit(
        lambda params, experience: optimize(loss, tx, jnp.float32(1e-3), 1, params, tx.init(params), experience)
    )
    choose = jax.jit(lambda key, *x: choose_tokens(config.actor.policy_loss, key, *x))
    key = jax.random.key(0) if mode == "clip_cov" else None
    directions = set()
    for estimator, experience in experiences.items():
        chosen = choose(key, experience.old_logp, experience.advantages, experience.batch.mask)
        params, _, metrics = step(model.params, dataclasses.replace(experience, values=None, chosen=chosen, metrics={}))
        assert all(np.isfinite(x) for x in metrics.values()), estimator
        assert metrics["skipped_updates"] == 0
        assert metrics["grad_norm"] > 0, estimator
        assert not np.array_equal(params["embed"], model.params["embed"])
        directions.add(float(metrics["grad_norm"]))
        if mode in ("clip_cov", "kl_cov"):
            assert chosen.sum(axis=(1, 2, 3)).min() > 0
    assert len(directions) == len(ESTIMATORS), "no two estimators are the same"


def test_without_a_critic_there_is_nothing_of_one(model, mesh, experiences):
    """No parameters, no optimizer, no pass and no metric; the actor still learns."""
    config = family_config("grpo", "gspo")
    state = init_state(config, jax.tree.map(jnp.copy, model.params), None, jax.random.key(0))
    experience = experiences["grpo"]
    assert experience.values is None
    after, metrics = make_update_step(config, model, mesh)(state, experience)
    assert after.critic is None
    assert after.critic_opt is None
    assert not [name for name in metrics if name.startswith(("critic/v", "critic/grad", "critic/lr", "critic/skip"))]
    assert {"critic/advantages/mean", "critic/returns/mean", "critic/rewards/mean"} <= metrics.keys()
    assert not np.array_equal(after.actor["embed"], model.params["embed"])


def test_outcome_advantages_are_one_number_a_response(experiences):
    """By hand: rewards are 0 or 1 minus a KL penalty, so a group of equals differs by the penalty alone."""
    for estimator in ("grpo", "rloo", "opo", "gpg", "grpo_passk"):
        experience = experiences[estimator]
        batch, advantages = experience.batch, np.asarray(experience.advantages)
        np.testing.assert_array_equal(advantages, experience.returns)
        for m, k, b in np.ndindex(*batch.mask.shape[:3]):
            for segment in range(1, int(batch.segment_ids[m, k, b].max()) + 1):
                tokens = np.asarray(batch.mask[m, k, b] & (batch.segment_ids[m, k, b] == segment))
                assert len(set(advantages[m, k, b][tokens].tolist())) == 1
        assert not advantages[~np.asarray(batch.mask)].any()


def test_the_energy_of_a_token_is_the_squared_length_of_its_score_function():
    logits = np.random.default_rng(0).normal(size=(5, 9))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    sharp = np.exp(2 * logits) / np.exp(2 * logits).sum(-1, keepdims=True)
    expected = ((np.eye(9)[3] - p) ** 2).sum(-1)
    logp, sharp_logp = (jnp.asarray(np.log(x[:, 3]), jnp.float32).reshape(1, 1, 1, 5) for x in (p, sharp))
    np.testing.assert_allclose(score_energy(logp, sharp_logp, None)[0, 0, 0], expected, rtol=1e-5)
    weighted = score_energy(logp, sharp_logp, jnp.full_like(logp, 3.0))
    np.testing.assert_allclose(weighted[0, 0, 0], 9 * expected, rtol=1e-5)


def fingerprint(batch, spread=False) -> np.ndarray:
    """Σ advantage · a function of the token and its place, which no layout can hide from, for some estimators."""

    @jax.jit
    def compute(batch):
        word = jnp.cos(3.0 * batch.tokens + 7.0 * batch.positions)
        old = jnp.where(batch.mask, -1 - 0.1 * (batch.tokens % 5), 0)
        found = []
        for estimator in ("grpo", "opo", "optimal_token_baseline"):
            experience = make_experience(
                family_config(estimator), jnp.float32(0.1), batch, old, 1.1 * old, None, old, sharp_logp=1.5 * old
            )
            found += [(experience.advantages * word).sum(), jnp.abs(experience.advantages).sum()]
        return jnp.stack(found)

    return np.asarray(compute(place_rows(batch, make_mesh(MeshConfig(data=8, fsdp=1))) if spread else batch))


def test_rows_packing_and_devices_do_not_change_group_advantages():
    """Groups lie across rows, microbatches, minibatches and devices."""
    rollouts = random_rollouts()
    expected = fingerprint(pad(rollouts, 10, rows=6, minibatches=2))
    assert np.abs(expected).min() > 0.1
    layouts = [
        fingerprint(pack(rollouts, 20, rows=1, minibatches=2, longest=10)),
        fingerprint(pad(rollouts[::-1], 13, rows=3)),
        fingerprint(pad(rollouts, 10, rows=8), spread=True),
    ]
    for found in layouts:
        np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_off_is_the_plain_program():
    """Whatever is off leaves no trace: the compiled scoring of the defaults has no sort and no random bit in it."""
    config = tiny_config()
    assert config.algorithm.rollout_correction == RolloutCorrectionConfig()
    batch = pad(random_rollouts(), 10, rows=6, minibatches=2)
    zeros = jnp.zeros(batch.mask.shape)
    text = str(jax.make_jaxpr(lambda b: make_experience(config, jnp.float32(0), b, *[zeros] * 4))(batch))
    assert not [name for name in (" sort[", "random_", "threefry") if name in text]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_one_token_alone_is_no_trouble(estimator):
    """One token in the whole batch, and an empty response beside it."""
    rollouts = [dataclasses.replace(r, in_loss=False) for r in random_rollouts(2)]
    rollouts[0] = dataclasses.replace(rollouts[0], response=rollouts[0].response[:1], logprobs=rollouts[0].logprobs[:1])
    rollouts[0] = dataclasses.replace(rollouts[0], in_loss=True)
    batch = jax.tree.map(jnp.asarray, pad(rollouts, 10, rows=2))
    zeros = jnp.zeros(batch.mask.shape)
    experience = make_experience(family_config(estimator), jnp.float32(0), batch, *[zeros] * 4)
    assert np.isfinite(experience.advantages).all()
