"""Checkpoints that any layout can go on from: whole arrays, each written once by the process that has it."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.step import Spread
from training.errors import InputError


class Checkpoints:
    """The checkpoints of a run, the newest two; orbax lets the processes agree on when one is whole."""

    def __init__(self, folder: Path, facts: dict[str, Any]):
        self.folder, self._facts = folder.absolute(), facts
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, plan: Spread, params: Any, state: Any) -> None:
        whole = plan.tx.whole_state(state, params, plan.mesh) if plan.zero else state
        arrays, facts = ocp.args.StandardSave({"params": params, "state": whole}), ocp.args.JsonSave(self._facts)
        self._manager.save(step, args=ocp.args.Composite(arrays=arrays, facts=facts), force=True)
        self._manager.wait_until_finished()

    def restore(self, step: int, plan: Spread, params: Any) -> tuple[Any, Any]:
        """(params, state) where the plan has them; `params` may be shapes."""
        saved = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore())).facts
        for name, value in self._facts.items():
            if saved.get(name) != value:
                raise InputError(
                    f"the checkpoints in {self.folder} are of {name} {saved.get(name)} and this run is of {value}; "
                    f"write --{name.replace('_', '-')} {saved.get(name)}, or another --run-dir"
                )
        state_specs = jax.tree.map(lambda _: P(), plan.state_specs, is_leaf=_is_spec) if plan.zero else plan.state_specs
        like = {
            "params": _placed(params, plan.param_specs, plan),
            "state": _placed(jax.eval_shape(plan.tx.init, params), state_specs, plan),
        }
        arrays = self._manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(like))).arrays
        state = plan.tx.split_state(arrays["state"], params, plan.mesh) if plan.zero else arrays["state"]
        return arrays["params"], state

    def close(self) -> None:
        self._manager.close()


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _placed(shapes: Any, specs: Any, plan: Spread) -> Any:
    return jax.tree.map(
        lambda spec, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(plan.mesh, spec)),
        specs,
        shapes,
        is_leaf=_is_spec,
    )
