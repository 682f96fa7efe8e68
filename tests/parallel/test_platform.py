"""The split of a GPU's memory between jax and vLLM, decided before either starts."""

import jax
import pytest

from jaxppo.config import Config, ConfigError, RolloutConfig
from jaxppo.parallel.platform import keep_compilations, prepare


def environment(given=None, **rollout):
    environ = dict(given or {})
    prepare(Config(rollout=RolloutConfig(**{"engine": "vllm", **rollout})), environ)
    return environ


def test_one_setting_splits_the_memory():
    environ = environment(gpu_memory_utilization=0.5)
    assert environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.450"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in environ


def test_the_builtin_engine_leaves_the_environment_alone():
    assert environment(engine="jax") == {}


def test_a_sleeping_engine_needs_a_jax_that_gives_memory_back():
    assert environment(sleep_level=2)["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_what_the_user_exported_stands_if_it_fits():
    assert environment({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"})["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.3"


@pytest.mark.parametrize(
    ("given", "utilization", "message"),
    [
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.75"}, 0.5, "gpu_memory_utilization = 0.5 and XLA_PYTHON_CLIENT_MEM_FRA"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, 0.5, "'most': must be a number"),
        ({}, 0.97, "gpu_memory_utilization = 0.97: must lie between"),
        ({}, 0.0, "gpu_memory_utilization = 0.0: must lie between"),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, 0.5, "VLLM_ENABLE_V1_MULTIPROCESSING = 1"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_settings(given, utilization, message):
    with pytest.raises(ConfigError, match=message):
        environment(given, gpu_memory_utilization=utilization)


@pytest.mark.parametrize(
    ("backend", "given", "expected"),
    [("gpu", None, "/cache/jaxppo/xla"), ("gpu", "/mine", "/mine"), ("cpu", None, None)],
)
def test_programs_for_a_gpu_are_kept_where_the_user_says_or_in_the_cache(monkeypatch, backend, given, expected):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    jax.config.update("jax_compilation_cache_dir", given)
    try:
        keep_compilations()
        assert jax.config.jax_compilation_cache_dir == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
