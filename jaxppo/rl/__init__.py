"""The mathematics of PPO: pure functions of arrays, in jax alone.

Arrays are [*batch, T]: any leading shape, tokens last. Index t speaks of the token at t. `mask` is bool,
True at the tokens that count; `segment_ids` is 0 at padding and elsewhere names a run of adjacent tokens,
one sequence. What lies outside the mask never has an effect, NaN included. Results are float32, or float64
from float64.
"""
