import jax
import jax.numpy as jnp

from jaxppo.run.compiling import CompileClock, compile_clock


def test_a_span_inside_another_counts_once(monkeypatch):
    clock = CompileClock()
    for end, event, seconds in (
        (3.0, "/jax/core/compile/backend_compile_duration", 1.0),
        (5.0, "/jax/core/compile/jaxpr_trace_duration", 1.0),
        (6.0, "/jax/core/compile/jaxpr_trace_duration", 2.5),  # from 3.5: around the one before
        (9.0, "/jax/compilation_cache/cache_retrieval_time_sec", 1.0),
    ):
        monkeypatch.setattr("time.perf_counter", lambda end=end: end)
        clock(event, seconds)
    assert clock.seconds == 1.0 + 2.5


def test_jax_tells_of_a_compilation_and_of_no_later_call():
    clock = compile_clock()
    assert compile_clock() is clock
    before, x = clock.seconds, jnp.arange(7.0)
    f = jax.jit(lambda x: jnp.sin(x) * 3 + 1)
    f(x)
    after = clock.seconds
    assert after > before
    f(x)
    assert clock.seconds == after
