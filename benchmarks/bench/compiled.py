"""Programs for an NVIDIA GPU, compiled on a machine without one, and what can be counted in them."""

import importlib.metadata
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from .hlo import collectives_in, cost_of, entry_operations, kernel_time, launches_in

_BLOCKS = """
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536"""

# XLA's GpuTargetConfigProto, with the figures that NVIDIA publishes for each card.
SPECS = {
    "a100": f"""gpu_device_info {{ {_BLOCKS}
  shared_memory_per_core: 167936 core_count: 108 fpus_per_core: 64 memory_bandwidth: 2039040000000
  l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 85100068864
  shared_memory_per_block_optin: 166912 cuda_compute_capability {{ major: 8 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "NVIDIA A100-SXM4-80GB" """,
    "h100": f"""gpu_device_info {{ {_BLOCKS}
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "NVIDIA H100 80GB HBM3" """,
}


class Unavailable(Exception):
    """What is missing on this machine, and what to do about it."""


class Counts(NamedTuple):
    launches: int
    bytes: int  # read and written in all, by XLA's cost analysis of the optimized program
    temporary: int  # bytes beyond arguments and results
    collectives: dict[str, int]
    microseconds: float | None  # XLA's own estimate of the kernels' time, where it gives one
    seconds: float  # to trace, lower and compile


def gpu_mesh(spec: str, devices: int) -> Mesh:
    """`devices` GPUs of a kind that needn't be here, as a mesh with the axis "devices".

    Raises:
      Unavailable: without the compiler for them.
    """
    wanted = importlib.metadata.version("jaxlib")
    try:
        found = importlib.metadata.version("jax-cuda12-pjrt")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != wanted:
        raise Unavailable(
            f"XLA's compiler for CUDA must have jaxlib's version, {wanted}, and there is {found}; "
            f"pip install --no-deps jax-cuda12-pjrt=={wanted} (174 MB; no GPU, driver or CUDA is needed)"
        )
    text = SPECS.get(spec) or Path(spec).read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{devices}")
    return Mesh(np.array(topology.devices), ("devices",))


def compiled(function: Any, *args: Any, donate: tuple[int, ...] = (), times: bool = False) -> Any:
    options: dict[str, Any] = {"xla_gpu_collect_cost_model_stats": True} if times else {}
    return jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=options)


def count(function: Any, *args: Any, donate: tuple[int, ...] = (), times: bool = False) -> Counts:
    """Compiles a function for the devices that its arguments' shardings name, and counts."""
    start = time.perf_counter()
    program = compiled(function, *args, donate=donate, times=times)
    seconds = time.perf_counter() - start
    text = program.as_text()
    operations = entry_operations(text)
    memory = program.memory_analysis()
    return Counts(
        launches=launches_in(operations),
        bytes=cost_of(program),
        temporary=memory.temp_size_in_bytes,
        collectives=collectives_in(text),
        microseconds=kernel_time(text),
        seconds=seconds,
    )
