"""What is known only when a program is lowered: its platform, and whether its arrays are whole on each device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# How to reduce many arrays: each by itself, or as one where they lie whole in one device's memory.
EACH, ON_CPU, ON_GPU = 0, 1, 2


def arrays_are_whole(axis_context: Any) -> bool:
    """Whether an array of the program is a buffer on one device: one device in all, or every mesh axis taken by hand.

    Under sharded `jit` over several devices an array may lie in pieces, wherever the partitioner puts them, and whatever joins
    arrays would first gather them.
    """
    if hasattr(axis_context, "manual_axes"):
        return axis_context.manual_axes == frozenset(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", 0) == 1


@cache
def _strategy() -> Any:
    """The primitive, made when it is first used: `jax.extend` brings Pallas along, which takes longer to import than we do."""
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    def lowering(strategy: int) -> Any:
        def rule(ctx: Any) -> list[Any]:
            chosen = strategy if arrays_are_whole(ctx.module_context.axis_context) else EACH
            return [mlir.ir_constant(np.asarray(chosen, np.int32))]

        return rule

    primitive = Primitive("reduction_strategy")
    primitive.def_impl(lambda: jnp.asarray(EACH, jnp.int32))
    primitive.def_abstract_eval(lambda: jax.typeof(jax.ShapeDtypeStruct((), jnp.int32)))
    mlir.register_lowering(primitive, lowering(EACH))
    mlir.register_lowering(primitive, lowering(ON_CPU), platform="cpu")
    mlir.register_lowering(primitive, lowering(ON_GPU), platform="cuda")
    mlir.register_lowering(primitive, lowering(ON_GPU), platform="rocm")
    return primitive


def mesh_is_shared(leaves: Sequence[Any] = ()) -> bool:
    """Whether the trace itself knows that arrays may lie in pieces: a mesh in force, or in an array's type, of which the
    compiler has some axes."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(leaf).sharding.mesh for leaf in leaves)]
    return any(mesh.size > 1 and frozenset(mesh.manual_axes) != frozenset(mesh.axis_names) for mesh in meshes)


def reduction_strategy() -> jax.Array:
    """i32[]: EACH, ON_CPU or ON_GPU; a constant by the time the program is compiled, so that a switch on it costs nothing."""
    return _strategy().bind()
