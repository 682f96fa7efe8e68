"""The update's contract: exact where it must be exact, compiled once, nothing half done."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxppo.config import ActorConfig, Config, KLControlConfig, MeshConfig, PolicyLossConfig, RolloutCorrectionConfig
from jaxppo.parallel.mesh import make_mesh
from jaxppo.step.init import init_state, state_shardings
from jaxppo.step.packing import Rollout, pack
from jaxppo.step.score import make_score_step
from jaxppo.step.state import Experience, TrainState
from jaxppo.step.update import make_update_step, optimize
from tests.tiny import critic_params, pad, place_state, random_rollouts, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=1, fsdp=1), jax.devices()[:1])


def first_state(config: Config, model: Any, mesh: Any) -> TrainState:
    state = init_state(config, model.params, critic_params(model), jax.random.key(0))
    return place_state(state, state_shardings(config, model, model, mesh))


def snapshot(state: TrainState) -> TrainState:
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


def packed(rollouts: list[Rollout], config: Config):
    return pack(rollouts, config.row_length, rows=1, minibatches=config.minibatches_per_epoch, longest=10)


def with_lr(config: Config, lr: float) -> Config:
    return dataclasses.replace(
        config,
        actor=dataclasses.replace(config.actor, lr=lr),
        critic=dataclasses.replace(config.critic, lr=lr),
    )


def run_steps(config: Config, model: Any, mesh: Any, batches: list) -> tuple[TrainState, list[dict[str, float]]]:
    score, update = make_score_step(config, model, mesh), make_update_step(config, model, mesh)
    state, reference, history = first_state(config, model, mesh), jax.tree.map(jnp.copy, model.params), []
    for batch in batches:
        state, metrics = update(state, score(state, reference, batch))
        history.append({name: float(x) for name, x in metrics.items()})
    return state, history


def test_with_lr_0_nothing_moves_and_every_ratio_is_exactly_1(model, mesh):
    """4 epochs of 2 minibatches, packed into rows of their own lengths each step."""
    config = with_lr(tiny_config(ppo_epochs=4, loss_agg_mode="token-mean"), 0.0)
    before = snapshot(first_state(config, model, mesh))
    batches = [packed(random_rollouts(seed=seed), config) for seed in range(20)]
    state, history = run_steps(config, model, mesh, batches)
    for network in ("actor", "critic"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, network), getattr(before, network))
    for metrics in history:
        assert metrics["actor/ppo_kl"] == 0
        assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
        assert metrics["actor/reward_kl_penalty"] == 0
        assert metrics["critic/vf_clipfrac"] == 0


def test_the_ratio_of_an_unchanged_policy_is_bitwise_1(model, mesh):
    """Not only its mean: the update's own log-probabilities equal the scored ones bit for bit."""
    from jaxppo.models.logprobs import token_logprobs
    from jaxppo.step.state import microbatch

    config = tiny_config()
    state = first_state(config, model, mesh)
    batch = jax.tree.map(jnp.asarray, packed(random_rollouts(), config))
    experience = make_score_step(config, model, mesh)(state, None, batch)

    def loss(params: Any) -> tuple[Any, Any]:
        logp, entropy = token_logprobs(model, params, microbatch(batch, 0, 0), 1.0)
        return logp.sum() - 0.1 * entropy.sum(), logp

    (_, logp), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(state.actor)
    np.testing.assert_array_equal(logp, experience.old_logp[0, 0])


def test_one_minibatch_and_one_epoch_have_ppo_kl_0_and_still_learn(model, mesh):
    config = tiny_config(ppo_mini_batch_size=12)
    before = jax.tree.map(np.asarray, model.params)
    state, (metrics,) = run_steps(config, model, mesh, [packed(random_rollouts(), config)])
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/grad_norm"] > 0
    assert not np.array_equal(state.actor["embed"], before["embed"])


def test_on_policy_the_old_log_probabilities_are_not_computed_and_nothing_else_changes(model, mesh, monkeypatch):
    base = tiny_config(ppo_mini_batch_size=12)
    config = dataclasses.replace(base, algorithm=dataclasses.replace(base.algorithm, use_kl_in_reward=False))
    batch = packed(random_rollouts(), config)
    found = []
    for needed in (False, True):
        monkeypatch.setattr(Config, "needs_old_logp", property(lambda self, needed=needed: needed))
        score, update = make_score_step(config, model, mesh), make_update_step(config, model, mesh)
        experience = score(first_state(config, model, mesh), None, batch)
        assert (experience.old_logp is not None) == needed
        found.append(update(first_state(config, model, mesh), experience))
    (state, metrics), (want, everything) = found
    for network in ("actor", "critic"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *(getattr(s, network) for s in (state, want))
        )
    for name, value in metrics.items():
        np.testing.assert_allclose(value, everything[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert {"actor/entropy", "training/rollout_logp_diff_mean", "training/rollout_probs_diff_mean"} <= metrics.keys()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"actor": {"ppo_epochs": 2}}, True),
        ({"actor": {"ppo_mini_batch_size": 512}}, True),
        ({"actor": {"use_kl_loss": True}}, False),
        ({"algorithm": {"use_kl_in_reward": True}}, True),
        ({"algorithm": {"rollout_correction": RolloutCorrectionConfig(rollout_is="token")}}, True),
        ({"actor": {"policy_loss": PolicyLossConfig(loss_mode="kl_cov")}}, True),
        ({"trainer": {"critic_warmup": 1}}, True),
    ],
)
def test_when_old_log_probabilities_are_needed(changes, needed):
    config = Config(actor=ActorConfig(ppo_mini_batch_size=1024))
    for section, values in changes.items():
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    assert config.needs_old_logp == needed


def test_learning_raises_the_log_probability_of_what_was_rewarded(model, mesh):
    config = dataclasses.replace(
        tiny_config(ppo_epochs=4), algorithm=dataclasses.replace(tiny_config().algorithm, use_kl_in_reward=False)
    )
    rollouts = random_rollouts()
    batch = packed(rollouts, config)
    score = make_score_step(config, model, mesh)
    before = score(first_state(config, model, mesh), None, batch)
    state, _ = run_steps(config, model, mesh, [batch] * 3)
    after = score(state, None, batch)
    change = np.asarray(after.old_logp - before.old_logp)
    good, bad = batch.mask & (batch.scores == 1), batch.mask & (batch.scores == 0)
    assert change[good].mean() > 0.1 > -0.1 > change[bad].mean()


def test_the_program_compiles_once_whatever_the_lengths(model, mesh):
    config = tiny_config()
    score, update = make_score_step(config, model, mesh), make_update_step(config, model, mesh)
    state = first_state(config, model, mesh)
    state, _ = update(state, score(state, None, packed(random_rollouts(), config)))
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled: list[str] = []
        patch.setattr("jax._src.dispatch.log_elapsed_time", lambda *a, **k: compiled.append(str(a)))
        for seed in range(1, 5):
            state, _ = update(state, score(state, None, packed(random_rollouts(seed=seed), config)))
    assert update._cache_size() == 1
    assert compiled == []


def test_the_given_state_is_donated(model, mesh):
    config = tiny_config()
    state = first_state(config, model, mesh)
    experience = make_score_step(config, model, mesh)(state, None, packed(random_rollouts(), config))
    make_update_step(config, model, mesh)(state, experience)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.actor, state.critic)))


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(model, mesh):
    config = tiny_config()
    rollouts = random_rollouts()
    rollouts[0] = dataclasses.replace(rollouts[0], score=float("nan"))
    before = snapshot(first_state(config, model, mesh))
    state, (metrics,) = run_steps(config, model, mesh, [packed(rollouts, config)])
    assert metrics["actor/skipped_updates"] == 2  # whitening spreads the NaN over both minibatches
    assert metrics["critic/skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.actor, before.actor)
    jax.tree.map(np.testing.assert_array_equal, state.actor_opt, before.actor_opt)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.critic))


@pytest.mark.parametrize(
    ("advantages", "epochs", "mean", "skipped"),
    [
        ((1.0, 2.0, 6.0), 1, 3.0, 0),
        ((1.0, math.nan, 6.0), 1, 3.5, 1),
        ((1.0, math.nan, 6.0), 2, 3.5, 2),
        ((math.inf, math.nan, 6.0), 1, 6.0, 2),
        ((math.nan,) * 3, 1, math.nan, 3),
        ((1.0, 2.0, 6.0), 0, 0.0, 0),
    ],
)
def test_metrics_are_means_over_the_steps_that_were_taken(advantages, epochs, mean, skipped):
    """A loss p * advantage of one number p, so that its gradient and metric are the minibatch's advantage."""
    batch = jax.tree.map(jnp.asarray, pad(random_rollouts(3), 10, rows=1, minibatches=3))
    zeros = jnp.zeros(batch.mask.shape)
    experience = Experience(
        batch=batch, old_logp=zeros, ref_logp=zeros, values=zeros, returns=zeros, kl=jnp.zeros(()), importance=None,
        advantages=zeros + jnp.asarray(advantages)[:, None, None, None], chosen=None, metrics={},
    )  # fmt: skip

    def loss(params: Any, micro: Experience) -> Any:
        advantage, one = micro.advantages[0, 0], jnp.ones(())
        return params["p"] * advantage, (one, {"advantage": (advantage, one)})

    tx, params = optax.identity(), {"p": jnp.zeros(())}
    params, _, metrics = optimize(loss, tx, jnp.float32(0.5), epochs, params, tx.init(params), experience)
    assert metrics["skipped_updates"] == skipped
    np.testing.assert_array_equal([metrics["advantage"], metrics["grad_norm"]], mean)
    taken = epochs * (3 - skipped / max(epochs, 1))
    np.testing.assert_allclose(params["p"], -0.5 * taken * (0.0 if math.isnan(mean) else mean), rtol=1e-6)


def test_a_norm_above_its_limit_is_skipped_inside_the_update():
    """Gradients 1, 2, 6 of one number under a limit of 3."""
    batch = jax.tree.map(jnp.asarray, pad(random_rollouts(3), 10, rows=1, minibatches=3))

    def loss(params: Any, micro: Any) -> Any:
        return params["p"] * micro.scores[0, 0], (jnp.ones(()), {"x": (micro.scores[0, 0], jnp.ones(()))})

    zeros = jnp.zeros(batch.mask.shape)
    batch = batch.replace(scores=zeros + jnp.asarray([1.0, 2.0, 6.0])[:, None, None, None])
    experience = Experience(
        batch=batch, old_logp=zeros, ref_logp=zeros, values=zeros, returns=zeros, kl=jnp.zeros(()), importance=None,
        advantages=zeros, chosen=None, metrics={},
    )  # fmt: skip

    def unpacked(params: Any, micro: Any) -> Any:
        return loss(params, micro.batch)

    tx, params = optax.identity(), {"p": jnp.zeros(())}
    params, _, metrics = optimize(unpacked, tx, jnp.float32(1.0), 1, params, tx.init(params), experience, 3.0)
    assert (float(params["p"]), float(metrics["skipped_updates"]), float(metrics["grad_norm"])) == (-3.0, 1.0, 1.5)


def test_the_actor_waits_for_the_critics_warm_up(model, mesh):
    config = tiny_config()
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, critic_warmup=1))
    before = snapshot(first_state(config, model, mesh))
    batch = packed(random_rollouts(), config)
    state, _ = run_steps(config, model, mesh, [batch])
    jax.tree.map(np.testing.assert_array_equal, state.actor, before.actor)
    jax.tree.map(np.testing.assert_array_equal, state.actor_opt, before.actor_opt)
    assert not np.array_equal(state.critic["value_head"]["kernel"], before.critic["value_head"]["kernel"])
    state, _ = run_steps(config, model, mesh, [batch, batch])
    assert not np.array_equal(state.actor["embed"], before.actor["embed"])


def test_the_controller_moves_once_after_its_coefficient_was_used(model, mesh):
    """KL 0 against a target of 0.1: the coefficient falls by 0.2 * 12 / 100 each step."""
    config = tiny_config()
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, kl_ctrl=control))
    batch = packed(random_rollouts(), config)
    state, history = run_steps(with_lr(config, 0.0), model, mesh, [batch, batch])
    used = [metrics["actor/reward_kl_penalty_coeff"] for metrics in history]
    np.testing.assert_allclose(used, [0.5, 0.5 * 0.976], rtol=1e-6)
    np.testing.assert_allclose(float(state.kl.coef), 0.5 * 0.976**2, rtol=1e-6)


def test_a_batch_without_any_token_in_the_loss_changes_nothing(model, mesh):
    """No parameter decays, no moment or count of Adam's moves, and the controller does not take it for a KL of 0."""
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)
    config = tiny_config(weight_decay=0.1)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, kl_ctrl=control))
    rollouts = [dataclasses.replace(r, in_loss=False) for r in random_rollouts()]
    score, update = make_score_step(config, model, mesh), make_update_step(config, model, mesh)
    state, reference = first_state(config, model, mesh), jax.tree.map(jnp.copy, model.params)
    state, _ = update(state, score(state, reference, packed(random_rollouts(), config)))  # moments that are not 0
    before = snapshot(state)
    state, metrics = update(state, score(state, reference, packed(rollouts, config)))
    after = snapshot(state)
    assert after.step == before.step + 1
    jax.tree.map(np.testing.assert_array_equal, after.replace(step=before.step), before)
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == metrics["actor/skipped_updates"] == 0


def test_a_minibatch_without_any_token_in_the_loss_is_left_out(model, mesh):
    """The first of two minibatches is empty: as if there had been the second alone, also in the metrics' means."""
    config = tiny_config()
    rollouts = [dataclasses.replace(r, in_loss=i >= 6) for i, r in enumerate(random_rollouts())]
    state, (metrics,) = run_steps(config, model, mesh, [packed(rollouts, config)])
    swapped, (same,) = run_steps(config, model, mesh, [packed(rollouts[6:] + rollouts[:6], config)])
    assert state.actor_opt[1].count == state.critic_opt[1].count == 1
    jax.tree.map(np.testing.assert_array_equal, snapshot(state), snapshot(swapped))
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/vf_loss"):
        np.testing.assert_array_equal(metrics[name], same[name])
    assert metrics["actor/grad_norm"] > 0


def test_bfloat16_parameters_take_a_step_too(mesh):
    """Their gradients are still summed in float32; moments have the parameters' dtype."""
    config = tiny_config(lr=1e-2)
    model = tiny_model(dtype="bfloat16")
    state, (metrics,) = run_steps(config, model, mesh, [packed(random_rollouts(), config)])
    assert {x.dtype for x in jax.tree.leaves(state.actor)} == {jnp.dtype("bfloat16")}
    assert np.isfinite(metrics["actor/grad_norm"])
    assert not np.array_equal(state.actor["embed"], model.params["embed"])


def test_the_kl_as_a_loss_pulls_towards_the_reference(model, mesh):
    """Without any advantage only the KL's gradient is left: the policy moves to the reference."""
    config = tiny_config(use_kl_loss=True, kl_loss_coef=1.0, ppo_epochs=2, lr=1e-2)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, use_kl_in_reward=False))
    rollouts = [dataclasses.replace(r, score=0.0) for r in random_rollouts()]
    batch = packed(rollouts, config)
    score, update = make_score_step(config, model, mesh), make_update_step(config, model, mesh)
    state = first_state(config, model, mesh)
    state = dataclasses.replace(state, critic=jax.tree.map(jnp.zeros_like, state.critic))  # values and advantages 0
    reference, losses = tiny_model(seed=5).params, []
    for _ in range(3):
        state, metrics = update(state, score(state, reference, batch))
        losses.append(float(metrics["actor/kl_loss"]))
    assert losses[0] > losses[1] > losses[2] > 0
    assert metrics["actor/kl_coef"] == 1.0
