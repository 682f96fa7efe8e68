"""Drawing one token per sequence from its logits, and the log-probability of having drawn it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def processed_logits(
    logits: Float[Array, "S V"], temperature: Float[Array, ""] | float, top_k: int, top_p: float
) -> Float[Array, "S V"]:
    """logits / temperature, with -inf outside the top_k largest and then outside the nucleus of mass top_p.

    top_k = -1 and top_p = 1 cut nothing and sort nothing. The nucleus keeps the most probable tokens up to and
    with the one that reaches top_p (Holtzman et al. 2020). Of equal logits the lower token ids are kept first.
    """
    logits = logits / temperature
    slots, vocab = logits.shape
    top_k = top_k if 0 < top_k < vocab else vocab
    if top_k == vocab and top_p >= 1:
        return logits
    largest, tokens = jax.lax.top_k(logits, top_k)
    if top_p < 1:
        p = jax.nn.softmax(largest, axis=-1)
        largest = jnp.where(jnp.cumsum(p, axis=-1) - p < top_p, largest, -jnp.inf)
    # by index, not by comparison with the smallest one kept: that would keep all of its equals
    return jnp.full_like(logits, -jnp.inf).at[jnp.arange(slots)[:, None], tokens].set(largest)


def sample(
    logits: Float[Array, "S V"],
    keys: PRNGKeyArray,
    temperature: Float[Array, ""] | float,
    *,
    greedy: bool,
    top_k: int = -1,
    top_p: float = 1.0,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """One token per row with its own key, and its log-probability (nats) under the distribution drawn from.

    Greedy takes the most probable token and gives its log-probability at temperature 1.
    """
    if greedy:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        logits = processed_logits(logits, temperature, top_k, top_p)
        tokens = jax.vmap(jax.random.categorical)(keys, logits)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)
