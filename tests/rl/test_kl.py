"""KL estimates in value and gradient, and the coefficient's controllers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from jaxppo.rl.kl import AdaptiveKL, FixedKL, KLState, kl_estimate
from tests import oracle

KINDS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
LOGP = np.array([-1.0, -2.0, -0.1, -7.0, -3.0])
REF = np.array([-1.5, -1.0, -0.3, -6.0, -3.2])


def slope(kind, logp, ref):
    return jax.grad(lambda x: kl_estimate(x, ref, kind).sum())(logp)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_match_the_oracle(kind):
    with jax.enable_x64(True):
        logp, ref = jnp.asarray(LOGP), jnp.asarray(REF)
        expected = [oracle.kl(p, q, kind) for p, q in zip(LOGP, REF, strict=True)]
        assert_allclose(kl_estimate(logp, ref, kind), expected, rtol=1e-12)
        numeric = oracle.gradient(lambda x: sum(map(oracle.kl, x, REF, [kind] * 5)), LOGP)
        assert_allclose(slope(kind, logp, ref), numeric, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_has_the_estimators_value_and_the_gradient_of_k2(kind):
    logp, ref = jnp.asarray(LOGP, jnp.float32), jnp.asarray(REF, jnp.float32)
    assert_array_equal(kl_estimate(logp, ref, kind + "+"), kl_estimate(logp, ref, kind))
    assert_array_equal(slope(kind + "+", logp, ref), logp - ref)


def test_goldens():
    logp, ref = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
    assert_allclose(kl_estimate(logp, ref, "k1"), [0.5, -1])
    assert_allclose(kl_estimate(logp, ref, "k3"), [0.106531, 0.718282], atol=1e-6)
    assert_allclose(kl_estimate(jnp.array([0.0]), jnp.array([0.5]), "k3"), np.exp(0.5) - 1.5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["k3", "low_var_kl+", "k1", "abs+", "k2"])
def test_far_apart_policies_have_finite_values_and_gradients(kind, dtype):
    logp = jnp.array([-100.0, 200, -200, 0], dtype)
    value = kl_estimate(logp, jnp.zeros_like(logp), kind)
    assert value.dtype == jnp.float32
    assert jnp.isfinite(value).all()
    assert jnp.isfinite(slope(kind, logp, jnp.zeros_like(logp))).all()
    if kind == "k3":
        assert_allclose(value, [10, 10, 10, 0])


def test_equal_policies_have_no_kl_and_no_gradient():
    logp = jnp.array([-3.3, -0.01, 0.0])
    for kind in ("k1", "k2", "k3", "abs", "k3+"):
        assert_array_equal(kl_estimate(logp, logp, kind), 0)
    for kind in ("k2", "k3", "k3+", "k1+"):
        assert_array_equal(slope(kind, logp, logp), 0)


k3 = jax.jit(lambda logp, ref: kl_estimate(logp, ref, "k3"))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_is_never_negative(logp, ref):
    assert 0 <= k3(jnp.float32(logp), jnp.float32(ref)) <= 10


@pytest.mark.parametrize("kind", ["k4", "", "KL", "k3++"])
def test_unknown_kinds_name_the_valid_ones(kind):
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), kind)


@pytest.mark.parametrize(
    ("kl", "expected"), [(12, 0.201024), (0, 0.198976), (6, 0.2), (6.6, 0.2 * (1 + 0.1 * 256 / 1e4))]
)
def test_adaptive_coefficient_goldens(kl, expected):
    controller = AdaptiveKL(kl_coef=0.2, target_kl=6.0, horizon=10000)
    assert_allclose(controller.update(controller.init(), kl, 256).coef, expected, rtol=1e-6)
    traced = jax.jit(controller.update)(controller.init(), jnp.float32(kl), jnp.int32(256))
    assert_allclose(traced.coef, expected, rtol=1e-6)
    assert traced.coef.dtype == jnp.float32


@pytest.mark.parametrize("kl", [np.nan, np.inf, -np.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient(kl):
    controller = AdaptiveKL(kl_coef=0.2, target_kl=6.0, horizon=10000)
    assert_array_equal(controller.update(controller.init(), kl, 256).coef, np.float32(0.2))


def test_the_coefficient_never_turns_negative():
    assert AdaptiveKL(kl_coef=0.2, target_kl=6.0, horizon=10).update(KLState(jnp.float32(0.2)), 0, 256).coef == 0


def test_the_state_keeps_its_type_in_a_float64_world():
    with jax.enable_x64(True):
        controller = AdaptiveKL(kl_coef=0.2, target_kl=6.0, horizon=10000)
        assert controller.update(controller.init(), jnp.float64(12), 256).coef.dtype == jnp.float32


def test_fixed_coefficient_stays():
    controller = FixedKL(kl_coef=0.001)
    assert controller.update(controller.init(), np.nan, 5).coef == np.float32(0.001)


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_kl": 0.0},
        {"target_kl": -1.0},
        {"target_kl": float("nan")},
        {"horizon": 0},
        {"horizon": -5},
        {"kl_coef": -0.1},
        {"kl_coef": float("inf")},
    ],
)
def test_impossible_controllers_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        AdaptiveKL(**({"kl_coef": 0.2, "target_kl": 6.0, "horizon": 10000} | wrong))


def test_fixed_refuses_a_negative_coefficient():
    with pytest.raises(ValueError, match="kl_coef"):
        FixedKL(kl_coef=-1.0)
