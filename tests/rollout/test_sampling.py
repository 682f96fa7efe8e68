import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.rollout.sampling import processed_logits, sample


def draw(logits, n=4096, temperature=1.0, **settings):
    keys = jax.random.split(jax.random.key(0), n)
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    tokens, logp = sample(many, keys, temperature, greedy=False, **settings)
    return np.asarray(tokens), np.asarray(logp)


def test_the_temperature_divides_the_logits_before_the_softmax():
    tokens, logp = draw([2.0, 0.0], temperature=0.6)
    np.testing.assert_allclose(logp[tokens == 0], -0.035052, atol=1e-6)


def test_the_nucleus_ends_with_the_token_that_reaches_top_p():
    tokens, logp = draw(np.log([0.5, 0.3, 0.2]), top_p=0.7)
    assert set(tokens) == {0, 1}
    np.testing.assert_allclose(logp[tokens == 0], -0.470004, atol=1e-6)
    tokens, logp = draw(np.log([0.5, 0.3, 0.2]), top_p=0.5)
    assert set(tokens) == {0}
    np.testing.assert_allclose(logp, 0, atol=1e-6)


def test_top_k_keeps_the_k_largest():
    tokens, logp = draw(np.log([0.1, 0.5, 0.4]), top_k=2)
    assert set(tokens) == {1, 2}
    np.testing.assert_allclose(logp[tokens == 1], np.log(5 / 9), atol=1e-6)
    unchanged = processed_logits(jnp.ones((1, 3)), 1.0, top_k=5, top_p=1.0)
    np.testing.assert_array_equal(unchanged, jnp.ones((1, 3)))


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.9}])
def test_of_equal_logits_the_first_are_kept_and_no_more(settings):
    kept = jnp.isfinite(processed_logits(jnp.zeros((2, 4)), 1.0, **({"top_k": -1, "top_p": 1.0} | settings)))
    np.testing.assert_array_equal(kept, [[True, True, False, False]] * 2)


def test_the_nucleus_is_one_of_the_top_k():
    """0.4, 0.3, 0.2 of 0.9: two of them reach 0.75. Of the whole vocabulary it would take three."""
    tokens, logp = draw(np.log([0.2, 0.4, 0.1, 0.3]), top_k=3, top_p=0.75)
    assert set(tokens) == {1, 3}
    np.testing.assert_allclose(logp[tokens == 1], np.log(4 / 7), atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.5}])
def test_frequencies_are_those_of_the_reported_distribution(settings):
    """Chi-square with 3 degrees of freedom: under 16.3 but once in a thousand."""
    tokens, logp = draw(np.log([0.4, 0.3, 0.2, 0.1]), **settings)
    seen = sorted(set(tokens.tolist()))
    p = np.array([np.exp(logp[tokens == t][0]) for t in seen])
    np.testing.assert_allclose(p.sum(), 1, atol=1e-5)
    counts = np.array([(tokens == t).sum() for t in seen])
    assert ((counts - len(tokens) * p) ** 2 / (len(tokens) * p)).sum() < 16.3


def test_greedy_takes_the_mode_with_its_log_probability_at_temperature_1():
    tokens, logp = sample(jnp.array([[0.0, 2.0]]), jax.random.split(jax.random.key(0), 1), 0.0, greedy=True)
    assert tokens.tolist() == [1]
    np.testing.assert_allclose(logp, np.log(np.e**2 / (1 + np.e**2)), atol=1e-6)
