"""Over which devices a sum over a tree has to be taken, leaf by leaf."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._messages import shown

Names = tuple[Any, ...]

# Replicated leaves below this many entries aren't split over the devices: slicing would cost more than it saves.
SPLIT_FROM = 65536


def varying_axes(value: Any) -> frozenset[Any]:
    """The mesh axes over which a value's type says that it differs: empty outside of typed `shard_map`."""
    kind = jax.typeof(value)
    manual = getattr(kind, "manual_axis_type", None)  # JAX 0.10; `.vma` before it
    return frozenset(manual.varying if manual is not None else getattr(kind, "vma", frozenset()))


def axes_are_typed(name: Any) -> bool:
    """Whether this is traced in a `shard_map` that types its axes: there a device's own index varies."""
    return bool(varying_axes(jax.lax.axis_index(name)))


def in_manual_axes() -> bool:
    """Whether this is traced in `shard_map` or `pmap`, where each device runs the program on its own arrays."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _axis_names(axis_name: Any) -> Names:
    names = axis_name if isinstance(axis_name, (tuple, list)) else () if axis_name is None else (axis_name,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"axis_name must be the name of a mesh or pmap axis, several in a tuple, or None, not {shown(axis_name)}."
            )
    if len(set(names)) != len(names):
        raise ValueError(f"axis_name names an axis twice: {shown(axis_name)}.")
    return tuple(names)


def _names_in(spec: PartitionSpec) -> Names:
    parts = [part for part in spec if part is not None and part is not PartitionSpec.UNCONSTRAINED]
    return tuple(name for part in parts for name in (part if isinstance(part, tuple) else (part,)))


def _is_spec(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, PartitionSpec))


class Axes:
    """What `axis_name=` and `sharded=` say together.

    Args:
      axis_name: the axis of `pmap` or `shard_map` over which the gradients are spread or replicated, or a tuple of them.
      sharded: False: every device holds the same gradients. True: every leaf is another shard on each device.
        A tree of bools or `PartitionSpec`s, a prefix of the gradients' tree: leaf by leaf.
      called: the name of the argument that `sharded` came as, for the messages.

    Raises:
      TypeError, ValueError: for a name that isn't one, or a tree with other leaves than bools and specs.
    """

    def __init__(self, axis_name: Any = None, sharded: Any = False, *, called: str = "sharded"):
        self.names = _axis_names(axis_name)
        self.sharded = sharded
        try:
            leaves = jax.tree.leaves(sharded, is_leaf=_is_spec)
        except ValueError as error:  # JAX sorts a dict's keys, and can't if they are of several kinds
            raise TypeError(f"{called} must be a tree that JAX can flatten, not {shown(sharded)}: {error}") from error
        for leaf in leaves:
            if not _is_spec(leaf):
                raise TypeError(
                    f"{called} must be True, False, or a tree (a prefix of the gradients' tree) of bools and "
                    f"PartitionSpecs; it holds {shown(leaf)}."
                )
        if any(leaf is True for leaf in leaves) and not self.names:
            raise ValueError("sharded=True needs axis_name: over which axis is each leaf a different shard?")

    def of_leaves(self, tree: Any) -> list[frozenset[Any]]:
        """For each leaf of the tree, in order: the axes over which it is a different shard on each device.

        Along an axis that `shard_map` types, a leaf's own type answers, whatever else was said. Along the others `sharded`
        does; the axes that the compiler looks after (sharded `jit`) need no sum over devices.
        """
        self.check_bound()
        kinds: dict[Any, str | None] = {}
        spread = [self._by_hand(path, self._said(spec), kinds) for path, spec in self._specs(tree)]
        return [
            axes | (varying_axes(leaf) if hasattr(leaf, "dtype") else frozenset())
            for axes, leaf in zip(spread, jax.tree.leaves(tree), strict=True)
        ]

    def _specs(self, tree: Any) -> list[tuple[Any, Any]]:
        """(path of what says it, bool or PartitionSpec) for each leaf of the tree."""
        if _is_spec(self.sharded):
            return [((), self.sharded)] * len(jax.tree.leaves(tree))

        def to_leaves(path: Any, spec: Any, part: Any) -> Any:
            return jax.tree.map(lambda _: _Said(path, spec), part)

        try:
            said = jax.tree_util.tree_map_with_path(to_leaves, self.sharded, tree, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(_misfit(self.sharded, tree)) from error
        return [(leaf.path, leaf.spec) for leaf in jax.tree.leaves(said)]

    def _said(self, spec: Any) -> Names:
        return _names_in(spec) if isinstance(spec, PartitionSpec) else self.names if spec else ()

    def _by_hand(self, path: Any, names: Names, kinds: dict[Any, str | None]) -> frozenset[Any]:
        """Those of the axes along which a sum over devices is ours to take and no type says where."""
        for name in names:
            if name not in kinds:
                kinds[name] = _kind_of_axis(name)
            if kinds[name] is None:
                raise ValueError(
                    f"sharded{jax.tree_util.keystr(path)} names the axis {name!r}, which isn't an axis of the pmap or shard_map "
                    "around this step. Inside one, give the name that it has; under plain or sharded jit leave sharded out: "
                    "norms are global there by themselves."
                )
        return frozenset(name for name in names if kinds[name] == "by hand")

    def check_bound(self) -> None:
        for name in self.names:
            if _kind_of_axis(name) not in ("typed", "by hand"):
                raise ValueError(
                    f"axis_name={name!r} isn't an axis of the pmap or shard_map around this step. Inside one, give the name "
                    "that it has; under plain or sharded jit leave axis_name out: norms are global there by themselves."
                )


def _kind_of_axis(name: Any) -> str | None:
    """Who knows what differs along a mesh axis: its "typed" arrays, those "by hand", the "compiler"; None: no such axis."""
    try:
        return "typed" if axes_are_typed(name) else "by hand"
    except NameError:
        return "compiler" if name in jax.sharding.get_abstract_mesh().axis_names else None


def all_bound(names: Names) -> bool:
    """Whether this is traced inside of the `pmap` or `shard_map` (or the named `vmap`) that the axes are of."""
    return all(_kind_of_axis(name) in ("typed", "by hand") for name in names)


class _Said:
    """A spec and where it stands, as a leaf: a PartitionSpec or None alone would be taken for a subtree."""

    def __init__(self, path: Any, spec: Any):
        self.path, self.spec = path, spec


def _misfit(specs: Any, tree: Any) -> str:
    """Where a tree of specs stops being a prefix of the gradients' tree."""
    spec_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)]
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        if not any(path[: len(spec)] == spec for spec in spec_paths):
            where = jax.tree_util.keystr(path) or "the whole tree"
            return f"sharded doesn't fit the gradients: it says nothing of {where}. It must be a prefix of their tree."
    leaf_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for spec in spec_paths:
        if not any(path[: len(spec)] == spec for path in leaf_paths):
            return f"sharded doesn't fit the gradients: it names {jax.tree_util.keystr(spec)}, which they don't have."
    return "sharded doesn't fit the gradients: its tree must be a prefix of theirs, with the same kinds of containers."


_declared: ContextVar["Axes | None"] = ContextVar("declared_shards", default=None)


@contextlib.contextmanager
def shards_declared(axes: Axes) -> Iterator[None]:
    """While an inner transformation runs on a device's shards, its norms are taken as `axes` says."""
    token = _declared.set(axes)
    try:
        yield
    finally:
        _declared.reset(token)


class Both(Axes):
    """What two say together about the axes, such as a transformation itself and the one around it."""

    def __init__(self, own: Axes, outer: Axes):
        super().__init__()
        self.own, self.outer = own, outer
        self.names = tuple(dict.fromkeys(own.names + outer.names))

    def of_leaves(self, tree: Any) -> list[frozenset[Any]]:
        pairs = zip(self.own.of_leaves(tree), self.outer.of_leaves(tree), strict=True)
        return [own | outer for own, outer in pairs]


def in_force(axes: Axes) -> Axes:
    """The axes of a transformation together with those declared around it, if it runs on a device's shards."""
    outer = _declared.get()
    return axes if outer is None else Both(axes, outer)


def my_index(names: frozenset[Any]) -> jax.Array:
    """This device's number among those that differ along the axes, from 0."""
    return jnp.asarray(jax.lax.axis_index(tuple(sorted(names))), jnp.int32)


def device_count(names: frozenset[Any]) -> int:
    return jax.lax.axis_size(tuple(sorted(names))) if names else 1


def sum_over_devices(value: jax.Array, names: frozenset[Any]) -> jax.Array:
    """The sum over every axis; along one that the value doesn't vary over by its type there is a single device."""
    alike = tuple(name for name in sorted(names) if name not in varying_axes(value) and axes_are_typed(name))
    return jax.lax.psum(jax.lax.pcast(value, alike, to="varying") if alike else value, tuple(sorted(names)))
