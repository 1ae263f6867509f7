"""What the executor asks of TensorRT: a handful of calls, so that a test can stand in for it.

It knows nothing of plans or requests.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from granikv.attention.plan_buffers import ADDRESS_ALIGNMENT_BYTES
from granikv.config import ModelConfig
from granikv.engines.build_worker import load_tensorrt
from granikv.engines.builders import TRT_TYPES
from granikv.engines.io import MAX_BINDINGS
from granikv.engines.manifest import RuntimeFacts
from granikv.engines.records import file_hash
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError, Unavailable

NCCL_ID_BYTES = 128
ENTRY_POINTS = (
    "granikvLastError",
    "granikvBindArenas",
    "granikvUnbindArenas",
    "granikvNcclUniqueId",
    "granikvInitCommunicator",
)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class BindingNumbers:
    """Numbers of arenas. The plugin library has one set of them for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[int] = set()

    def take(self) -> int:
        """The lowest that is free. Raises Unavailable when none is."""
        with self._lock:
            for number in range(MAX_BINDINGS):
                if number not in self._taken:
                    self._taken.add(number)
                    return number
        raise Unavailable(
            f"binding: expected at most {MAX_BINDINGS} engines in a process, got one more; close "
            "one, or start another process"
        )

    def release(self, number: int) -> None:
        with self._lock:
            self._taken.remove(number)


BINDINGS = BindingNumbers()


class EngineRuntime(Protocol):
    """One engine of one rank. Shapes and addresses stay until they are set again."""

    device_type: str  # "cuda", or "cpu" for a test's double
    file_kind: str  # what `load` takes: "engine", or "graph" for a test's double

    def facts(self) -> RuntimeFacts:
        """What engines are compared with before one is loaded."""

    def load(self, path: Path, io: dict[str, Any]) -> None:
        """io: of the manifest. Raises ModelFileError for a file that is not an engine of this
        runtime, EngineMismatch for one with other inputs or outputs, Unavailable without memory.
        """

    def join_ranks(self, rank: int, tp_size: int, share: Callable[[bytes], bytes]) -> None:
        """Before the first step of a network with all-reduces; every rank calls it at once.

        share: returns rank 0's bytes on every rank; all give as many.
        """

    def bind_arenas(
        self, binding: int, k_arena: torch.Tensor, v_arena: torch.Tensor, config: ModelConfig
    ) -> None:
        """Tell the attention plugin of arenas [L, capacity, Hkv, D]; config: of this rank.

        binding: of BINDINGS. Raises Unavailable for one that is bound.
        """

    def unbind_arenas(self, binding: int) -> None:
        """After the last step has finished."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """False: the engine was not built for it."""

    def set_tensor_address(self, name: str, address: int) -> bool:
        """False: no such tensor. Raises InvalidArgument for an address that is out of alignment."""

    def execute_async_v3(self, stream: int) -> bool:
        """Queue the network on a CUDA stream. False: it was refused."""


@functools.cache  # a registry refuses plugins that it has: one library serves all of a process
def plugin_library(trt: Any, path: str) -> ctypes.CDLL:
    """The library at `path`, registered with TensorRT. Raises Unavailable."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise Unavailable(
            f"plugin: expected GraniKV's plugin library, got {path}: {error}; build it "
            "(trtllm_plugin/) and name it in `plugin`"
        ) from error
    missing = [name for name in ENTRY_POINTS if not hasattr(library, name)]
    if missing:
        raise Unavailable(
            f"plugin: {path}: expected a library that exports {', '.join(ENTRY_POINTS)}, got none "
            f"of {', '.join(missing)}; build it from this commit with build_scripts/build_plugin.py"
        )
    library.granikvLastError.restype = ctypes.c_char_p
    if trt.get_plugin_registry().load_library(path) is None:
        raise Unavailable(
            f"plugin: {path}: TensorRT's registry did not take it (its log says why); one process "
            "takes one library of these plugins"
        )
    return library


class TensorRTRuntime:
    """EngineRuntime by TensorRT and GraniKV's plugin library, on torch's current GPU.

    plugin: path of the library; `load` loads it, when `facts` were compared with the engines'.
    Raises Unavailable when there is no TensorRT or no such file.
    """

    device_type, file_kind = "cuda", "engine"

    def __init__(self, plugin: str | Path):
        try:
            self._trt = load_tensorrt("tensorrt")
        except ImportError as error:
            raise Unavailable(
                f"executor='tensorrt': expected TensorRT's Python package, got {error}; run in "
                "the project's container, or take executor='torch'"
            ) from error
        self._plugin = str(plugin)
        try:
            self._plugin_sha256 = file_hash(Path(plugin))
        except OSError as error:
            raise Unavailable(
                f"plugin: expected GraniKV's plugin library, got {plugin}: {error.strerror}; build "
                "it (trtllm_plugin/) and name it in `plugin`"
            ) from error
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        self._engine: Any = None
        self._context: Any = None

    def facts(self) -> RuntimeFacts:
        major, minor = torch.cuda.get_device_capability()
        return RuntimeFacts(self._trt.__version__, f"{major}.{minor}", self._plugin_sha256)

    def load(self, path: Path, io: dict[str, Any]) -> None:
        self._library = plugin_library(self._trt, self._plugin)  # before an engine that names it
        self._runtime = self._trt.Runtime(self._logger)  # it outlives what it makes
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise ModelFileError(f"{path}: TensorRT refused it (its log says why); build it again")
        self._check_tensors(path, io)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise Unavailable(f"{path}: no memory on the GPU for the engine's activations")

    def _check_tensors(self, path: Path, io: dict[str, Any]) -> None:
        """Name, side, type and shape (-1: dynamic) of every input and output are the manifest's."""
        wanted = {
            entry["name"]: (
                side,
                TRT_TYPES[entry["dtype"]],
                [-1 if isinstance(dim, str) else dim for dim in entry["dims"]],
            )
            for side in ("input", "output")
            for entry in io[f"{side}s"]
        }
        found, engine = {}, self._engine
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            is_input = engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
            side, dtype = "input" if is_input else "output", engine.get_tensor_dtype(name).name
            found[name] = (side, dtype, list(engine.get_tensor_shape(name)))
        for name in wanted | found:
            if wanted.get(name) != found.get(name):
                expected, got = (
                    "no such tensor" if name not in each else "{} {} {}".format(*each[name])
                    for each in (wanted, found)
                )
                raise EngineMismatch(
                    f"{path}: {name}: expected {expected}, as the manifest says, got {got}; engine "
                    "and manifest are of two builds: build again"
                )

    def join_ranks(self, rank: int, tp_size: int, share: Callable[[bytes], bytes]) -> None:
        unique_id = ctypes.create_string_buffer(NCCL_ID_BYTES)
        if rank == 0:
            self._call("granikvNcclUniqueId", unique_id, ctypes.c_int32(NCCL_ID_BYTES))
        shared = ctypes.create_string_buffer(share(unique_id.raw), NCCL_ID_BYTES)
        number = ctypes.c_int32(0)  # one group of ranks per process
        self._call(
            "granikvInitCommunicator",
            number,
            shared,
            ctypes.c_int32(tp_size),
            ctypes.c_int32(rank),
        )

    def bind_arenas(
        self, binding: int, k_arena: torch.Tensor, v_arena: torch.Tensor, config: ModelConfig
    ) -> None:
        layers, capacity = k_arena.shape[:2]
        addresses = (ctypes.c_int64 * (2 * layers))(
            *(arena[layer].data_ptr() for layer in range(layers) for arena in (k_arena, v_arena))
        )
        self._call(
            "granikvBindArenas",
            ctypes.c_int32(binding),
            ctypes.c_int32(k_arena.device.index or 0),
            ctypes.c_int32(layers),
            addresses,
            ctypes.c_int64(capacity),
            ctypes.c_int32(config.num_qo_heads),
            ctypes.c_int32(config.num_kv_heads),
            ctypes.c_int32(config.head_dim),
            ctypes.c_char_p(ELEMENTS[k_arena.dtype].encode()),
        )

    def unbind_arenas(self, binding: int) -> None:
        self._call("granikvUnbindArenas", ctypes.c_int32(binding))

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments):
            reason = self._library.granikvLastError() or b"no reason given"
            raise Unavailable(f"{name}: {reason.decode(errors='replace')}")

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._context.set_input_shape(name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        # NvInferRuntime.h, IExecutionContext::setTensorAddress: "at least 256-byte alignment"
        if address % ADDRESS_ALIGNMENT_BYTES:
            expected = f"a device address of {ADDRESS_ALIGNMENT_BYTES}-byte alignment"
            raise InvalidArgument(name, address, expected)
        return self._context.set_tensor_address(name, address)

    def execute_async_v3(self, stream: int) -> bool:
        return self._context.execute_async_v3(stream)
