"""FLOPs as a text book counts them, and how many rows, microbatches and chunks given lengths come to."""

import math

import numpy as np

from jaxppo.config import Config
from jaxppo.models.config import Architecture
from jaxppo.models.logprobs import CHUNK_BYTES, num_chunks
from jaxppo.models.parameters import declare
from jaxppo.planning.counting import Trips
from jaxppo.step.packing import assign_rows


def forward_flops(a: Architecture, lengths: np.ndarray, *, head: bool) -> float:
    """Of a forward pass over sequences of these lengths: 2 a parameter in a product and token, the `head`'s
    vocabulary where there is one, causal attention halved, segment by segment."""
    table = declare(a)
    matrices = sum(math.prod(p.shape) for path, p in table.items() if path[0] == "layers" and len(p.flat) == 2)
    attention = 2.0 * a.num_layers * a.num_heads * a.head_dim * float(np.sum(lengths.astype(float) ** 2))
    vocabulary = 2.0 * a.vocab_size * a.hidden_size * float(lengths.sum()) if head else 0.0
    return 2.0 * matrices * float(lengths.sum()) + attention + vocabulary


def model_flops(a: Architecture, lengths: np.ndarray) -> float:
    """Forward and backward (twice the forward) of an actor and a critic; nothing for recomputation."""
    return 3 * (forward_flops(a, lengths, head=True) + forward_flops(a, lengths, head=False))


def expected_trips(config: Config, network: Architecture, rows: int, row_shards: int, length: int) -> Trips:
    """Of minibatches whose sequences all have `length` tokens, packed as the trainer packs them."""
    packed = assign_rows([length] * (config.actor.ppo_mini_batch_size * config.rollout.n), config.row_length)
    local = config.row_length // config.mesh.context
    vocabulary = network.vocab_size // config.mesh.tensor
    chunk = local // num_chunks(rows // row_shards, local, vocabulary, CHUNK_BYTES)
    predicted = len(packed[0]) * response_tokens(config, length) / config.mesh.context
    return Trips(
        optimizer_steps=config.actor.ppo_epochs * config.minibatches_per_epoch,
        microbatches=math.ceil(len(packed) / rows),
        chunks=math.ceil(predicted / chunk),
        attention=len(packed[0]) * length**2 / 2 / config.row_length**2,
    )


def response_tokens(config: Config, length: int) -> int:
    """Of a sequence of `length` tokens, in the proportion of the two limits."""
    return max(1, round(length * config.data.max_response_length / config.max_sequence_length))
