"""Every test runs on eight simulated devices, under strict dtype and rank promotion."""

import os

# Before JAX starts: it reads these once. A test process of pytest-xdist gets one core's worth of threads.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("suite", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture
def loose():
    """JAX's own promotion rules, for code of others that counts on them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
