import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.config import UserError
from jaxppo.models.cudnn import cudnn_packed_attention, segment_table


def test_segments_become_lengths_and_starts():
    ids = jnp.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 4, 4, 4]])
    lengths, starts, fits = segment_table(ids, 3)
    np.testing.assert_array_equal(lengths, [[3, 2, -1], [1, 1, 1]])
    np.testing.assert_array_equal(starts, [[0, 3, -1, -1], [0, 1, 2, -1]])
    np.testing.assert_array_equal(fits, [True, False])


def test_where_the_kernel_does_not_apply_the_error_names_the_setting_and_what_is_valid():
    x = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(UserError, match=r"model.attention = 'cudnn_packed' needs .*'xla' is valid"):
        cudnn_packed_attention(x, x, x, jnp.ones((1, 4), jnp.int32))
