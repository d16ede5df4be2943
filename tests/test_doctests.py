"""Every docstring's example runs."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import optax_fp16

MODULES = [name for _, name, _ in pkgutil.iter_modules(optax_fp16.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_run(name):
    module = importlib.import_module(f"optax_fp16.{name}")
    with jax.numpy_dtype_promotion("standard"):
        result = doctest.testmod(module, extraglobs={"optax_fp16": optax_fp16})
    assert result.failed == 0


# Without the submodules among them: which of those there are depends on what was imported before.
@pytest.mark.parametrize("name", [name for name, value in vars(optax_fp16).items() if callable(value)])
def test_every_public_name_has_a_docstring_with_an_example(name):
    assert ">>>" in getattr(optax_fp16, name).__doc__
