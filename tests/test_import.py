"""What `import optax_fp16` costs, counted: nothing is imported that `import optax` hasn't imported already."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import optax
before = set(sys.modules)
import optax_fp16
print(*sorted(name for name in set(sys.modules) - before if name.split(".")[0] != "optax_fp16"))
print(*sorted(name for name in sys.modules if name.startswith("optax_fp16.")))
"""


@pytest.mark.slow
def test_importing_it_imports_nothing_that_optax_does_not_and_leaves_the_optional_modules_alone():
    found = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    strangers, ours = found.stdout.splitlines()
    assert strangers == ""
    assert "optax_fp16.recipe" in ours.split()
    assert not {"optax_fp16.flax", "optax_fp16.plot"} & set(ours.split())
