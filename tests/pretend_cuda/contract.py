"""Lists the promises of CUDA, NCCL and NVML for each name that the package uses, and the sources of the promises.

The stand-in of this folder follows this table. `tests/devices/test_cuda_contract.py` walks the package's syntax trees;
it fails for a used name that is not in the table, and for a name in the table that the package does not use. A build of
torch with CUDA can be installed without a GPU; in such a build, `missing()` returns the names that do not exist.

Sources: torch 2.8 to 2.13 (github.com/pytorch/pytorch; headers and Python files of the wheel of 2.13.0), NCCL 2.30
(github.com/NVIDIA/nccl), and the documentation of CUDA's runtime and of NVML.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_GROUP = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_GRAPH = "aten/src/ATen/cuda/CUDAGraph.cpp"
_GRAPHS = "torch/cuda/graphs.py"
_ALLOCATOR = "c10/cuda/CUDACachingAllocator.cpp"
_CUDA = "torch/cuda/__init__.py"
_MEMORY = "torch/cuda/memory.py"
_RANDOM = "torch/cuda/random.py"
_STREAMS = "torch/cuda/streams.py"
_BINDINGS = "torch/csrc/distributed/c10d/init.cpp"
_SHARED = "torch/csrc/distributed/c10d/symm_mem"
_INIT = "NCCL src/init.cc"
_NVML = "NVML API reference"
_OWNER = "the thread that made it"
_NOTHING = "nothing"


@dataclass(frozen=True)
class Entry:
    """The promise for one name.

    Attributes:
        returns: value that a caller gets, or effect of the call.
        source: file of the source, and symbol in it.
        waits: events that the calling thread waits for.
        frees: memory or handles that the call releases.
        thread: threads that may call it.
        since: first version for which this holds, if not all supported ones (torch 2.11 and later).
        cuda_build: whether only a build of torch with CUDA has the name.
    """

    returns: str
    source: str
    waits: str = _NOTHING
    frees: str = _NOTHING
    thread: str = "any"
    since: str = ""
    cuda_build: bool = False


DEVICES = {
    "torch.cuda.device_count": Entry(
        "number of devices by NVML, as CUDA_VISIBLE_DEVICES (numbers or UUIDs) restricts it; by the driver if NVML"
        " fails, if devices are named as MIG slices, or once CUDA is initialized. NVML counts devices that the driver"
        " may refuse to torch, and a device in MIG mode as one",
        f"{_CUDA}: device_count, _device_count_nvml, _parse_visible_devices",
    ),
    "torch.cuda.is_available": Entry(
        "whether the driver finds a device (initializes the driver, after which forks cannot use it); with"
        " PYTORCH_NVML_BASED_CUDA_CHECK=1, whether NVML does",
        f"{_CUDA}: is_available",
    ),
    "torch.cuda.is_initialized": Entry(
        "whether this process has a context, and is not a bad fork", f"{_CUDA}: is_initialized"
    ),
    "torch.cuda._is_in_bad_fork": Entry(
        "whether an ancestor initialized the driver before this process was forked",
        "torch/csrc/cuda/Module.cpp: THCPModule_isInBadFork; torch/csrc/utils/device_lazy_init.cpp:"
        " register_fork_handler",
    ),
    "torch.cuda.set_device": Entry(
        "the current device of the calling thread", f"{_CUDA}: set_device", thread="any, for itself"
    ),
    "torch.cuda.device": Entry(
        "context manager: the current device within it", f"{_CUDA}: device", thread="any, for itself"
    ),
    "torch.cuda.get_device_properties": Entry(
        "name, total_memory in bytes, multi_processor_count, … of a device; makes the context",
        f"{_CUDA}: get_device_properties",
    ),
    "torch.cuda.get_device_capability": Entry(
        "(major, minor) of a device's compute capability; makes the context", f"{_CUDA}: get_device_capability"
    ),
    "torch.cuda.can_device_access_peer": Entry(
        "whether kernels of a device can read the memory of another device; makes no context",
        f"{_CUDA}: can_device_access_peer; cudaDeviceCanAccessPeer",
    ),
    "torch.AcceleratorError": Entry(
        "raised at a call of CUDA that fails; after an error of a kernel, at all that follow in the process",
        "c10/cuda/CUDAException.cpp: c10_cuda_check_implementation; CUDA runtime, cudaErrorAssert",
    ),
}

MEMORY = {
    "torch.OutOfMemoryError": Entry(
        "raised if there is no room, after cached blocks, also those of pools whose graphs were all reset, were freed"
        " and the allocation was tried again",
        f"{_ALLOCATOR}: malloc, release_cached_blocks",
    ),
    "torch.cuda.empty_cache": Entry(
        "None",
        f"{_MEMORY}: empty_cache; {_ALLOCATOR}: release_cached_blocks",
        waits="the streams' events on cached blocks; cudaFree waits for the device",
        frees="unused segments; of a graph's pool only once each of its graphs was reset, and what is unused of it",
    ),
    "torch.cuda.mem_get_info": Entry(
        "(free, total) bytes of the device, all processes counted", f"{_MEMORY}: mem_get_info; cudaMemGetInfo"
    ),
    "torch.cuda.memory_allocated": Entry("bytes of live tensors", f"{_MEMORY}: memory_allocated"),
    "torch.cuda.memory_reserved": Entry(
        "bytes of all segments, cached ones and graphs' pools included", f"{_MEMORY}: memory_reserved"
    ),
    "torch.cuda.memory_summary": Entry("a table, as text", f"{_MEMORY}: memory_summary"),
    "torch.Tensor.record_stream": Entry(
        "None: memory of the tensor is reused only after what the stream holds when the tensor is freed",
        f"{_ALLOCATOR}: recordStream, insert_events",
    ),
    "pin_memory=": Entry(
        "memory of the host that is page-locked: copies from and to it can be asynchronous; rounded up to powers of"
        " two, and reused only after the copies that were queued from it",
        "aten/src/ATen/cuda/CachingHostAllocator.cpp; aten/src/ATen/core/CachingHostAllocator.h: record_event, free",
        waits="may wait for the device: cudaHostAlloc",
    ),
    "non_blocking=": Entry(
        "a copy that is queued; between the host and a device only from and to page-locked memory, else it waits."
        " What is read on the host before the stream was waited for is what lay there",
        "aten/src/ATen/native/cuda/Copy.cu: copy_kernel_cuda",
    ),
}

STREAMS = {
    "torch.cuda.synchronize": Entry("None", f"{_CUDA}: synchronize", waits="all work of the device"),
    "torch.cuda.Stream": Entry(
        "a stream from a pool of 32 for each device", f"{_STREAMS}: Stream; c10/cuda/CUDAStream.cpp"
    ),
    "torch.cuda.Stream.wait_stream": Entry(
        "None: later work on this stream runs after the work that the other stream holds now",
        f"{_STREAMS}: Stream.wait_stream",
    ),
    "torch.cuda.Stream.wait_event": Entry("None: as wait_stream, after the event", f"{_STREAMS}: Stream.wait_event"),
    "torch.cuda.Stream.record_event": Entry(
        "an event after what the stream holds now", f"{_STREAMS}: Stream.record_event"
    ),
    "torch.cuda.stream": Entry(
        "context manager: the current stream within it. Nothing orders it with the stream that was current before",
        f"{_CUDA}: StreamContext",
        thread="any, for itself",
    ),
    "torch.cuda.current_stream": Entry("the calling thread's", f"{_CUDA}: current_stream", thread="any, for itself"),
    "torch.cuda.default_stream": Entry("stream 0, which no other has to wait for", f"{_CUDA}: default_stream"),
    "torch.cuda.Event": Entry(
        "an event that nothing recorded yet: waiting for it returns at once", f"{_STREAMS}: Event"
    ),
    "torch.cuda.Event.record": Entry(
        "None: the event is after what the current stream holds now", f"{_STREAMS}: Event.record"
    ),
    "torch.cuda.Event.synchronize": Entry(
        "None", f"{_STREAMS}: Event.synchronize", waits="all that was queued before the event"
    ),
    "torch.cuda.Event.elapsed_time": Entry(
        "milliseconds between two events with enable_timing=True that the device has reached",
        f"{_STREAMS}: Event.elapsed_time; CUDA runtime, cudaEventElapsedTime",
    ),
}

GRAPHS = {
    "torch.cuda.CUDAGraph": Entry(
        "a graph that nothing was captured into. It holds addresses and no tensors: memory that it reads or writes"
        " outside its pool may be freed, and is then written to all the same",
        f"{_GRAPH}: CUDAGraph; {_GRAPHS}: CUDAGraph, check_input_liveness",
    ),
    "torch.cuda.CUDAGraph.replay": Entry(
        "None: the graph is queued on the current stream",
        f"{_GRAPH}: CUDAGraph::replay",
        waits="room in the launch queue, if more than a thousand launches wait there",
    ),
    "torch.cuda.CUDAGraph.reset": Entry(
        "None. Allowed at any time; a graph that runs is freed when it has run",
        f"{_GRAPH}: CUDAGraph::reset; CUDA runtime, cudaGraphExecDestroy",
        frees="the graph, what NCCL keeps for its collectives (src/enqueue.cc: persistentDestructor, reclaimPlan),"
        " and, if it was the last of its pool, the pool's unused memory for empty_cache (releasePool)",
    ),
    "torch.cuda.is_current_stream_capturing": Entry(
        "whether the current stream is captured. It asks for the current device, which initializes the driver (cuInit)",
        "torch/csrc/cuda/Graph.cpp: _cuda_isCurrentStreamCapturing; c10/cuda/CUDAFunctions.cpp: current_device",
    ),
    "torch.cuda.graph": Entry(
        "context manager that captures what is queued within it: nothing runs. A call that waits for the device, and"
        " a copy from pageable memory, fail; capture_error_mode='thread_local' binds the calling thread alone. If it"
        " fails, the end of the capture raises an error of its own",
        f"{_GRAPHS}: graph.__enter__, graph.__exit__; {_GRAPH}: capture_begin, capture_end",
        waits="the whole device, and empties the cache, before the capture begins",
    ),
    "torch.cuda.graph_pool_handle": Entry(
        "an id. Its pool exists from the first capture on. Once each of its graphs was reset, a capture into it fails"
        " as long as a tensor of it lives ('use_count > 0'): take another id",
        f"{_ALLOCATOR}: create_or_incref_pool, releasePool",
    ),
    "torch.cuda.default_generators": Entry(
        "one generator a device, empty before CUDA is initialized",
        "torch/csrc/cuda/Module.cpp: THCPModule_initExtension",
    ),
    "torch.Generator.get_state": Entry("uint8 on the host", "torch/csrc/Generator.cpp: getState"),
    "torch.Generator.clone_state": Entry(
        "a generator with its own copy of the state", "torch/csrc/Generator.cpp: cloneState"
    ),
    "torch.Generator.graphsafe_set_state": Entry(
        "self, which has the other's state object from now on",
        "aten/src/ATen/cuda/CUDAGeneratorImpl.cpp: graphsafe_set_state",
    ),
}

RANDOM = {
    "torch.cuda.manual_seed": Entry("None: seeds the current device's generator", f"{_RANDOM}: manual_seed"),
    "torch.cuda.get_rng_state": Entry(
        "uint8 `[16]` on the host: seed and offset. A draw moves the offset by an amount that depends on the number of"
        " multiprocessors, as its numbers do: unlike devices draw unlike numbers from one state",
        f"{_RANDOM}: get_rng_state; aten/src/ATen/native/cuda/DistributionTemplates.h: calc_execution_policy",
    ),
    "torch.cuda.set_rng_state": Entry("None", f"{_RANDOM}: set_rng_state"),
}

DISTRIBUTED = {
    "torch.distributed.is_nccl_available": Entry(
        "whether torch was built with NCCL", "torch/distributed/distributed_c10d.py"
    ),
    "torch.distributed.Store": Entry(
        "base of stores: set; get, which waits until a rank has set the key; check",
        "torch/csrc/distributed/c10d/Store.hpp",
    ),
    "torch.distributed.Store.set_timeout": Entry(
        "None: the limit of a store's waits; a clone has its own", "torch/csrc/distributed/c10d/Store.cpp: setTimeout"
    ),
    "torch.distributed.FileStore": Entry("a store in a file", "torch/csrc/distributed/c10d/FileStore.cpp"),
    "torch.distributed.TCPStore": Entry("a store at a port", "torch/csrc/distributed/c10d/TCPStore.cpp"),
    "torch.distributed.PrefixStore": Entry(
        "another store, its keys with a prefix", "torch/csrc/distributed/c10d/PrefixStore.cpp"
    ),
    "torch.distributed.DistStoreError": Entry("raised by stores", "torch/csrc/Exceptions.h"),
    "torch.distributed.DistBackendError": Entry(
        "raised by a collective of NCCL that cannot be queued, and by one of a group that was aborted",
        f"torch/csrc/Exceptions.h; {_GROUP}: C10D_NCCL_CHECK_TIMEOUT; NCCLUtils.cpp: NCCLComm::getNcclComm",
    ),
    "torch.distributed.AllreduceOptions": Entry("sum, timeout, asyncOp", "torch/csrc/distributed/c10d/Types.hpp"),
    "torch.distributed.AllreduceOptions.asyncOp": Entry(
        "True by default here. False: the collective is on the current stream",
        f"{_GROUP}: collective",
        since="torch 2.7",
    ),
    "torch.distributed.distributed_c10d.AllgatherOptions": Entry(
        "timeout, asyncOp", "torch/csrc/distributed/c10d/Types.hpp"
    ),
    "torch.distributed.distributed_c10d.AllgatherOptions.asyncOp": Entry(
        "as of AllreduceOptions", f"{_GROUP}: collective"
    ),
    "torch.distributed.ProcessGroupGloo": Entry(
        "gloo between CPU ranks", "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"
    ),
    "torch.distributed.ProcessGroupGloo._Options": Entry("its options", _BINDINGS),
    "torch.distributed.ProcessGroupGloo.create_device": Entry("a device of gloo", _BINDINGS),
    "torch.distributed.Work.is_completed": Entry(
        "whether a collective of gloo has ended", "torch/csrc/distributed/c10d/Work.hpp"
    ),
    "torch.distributed.Work.wait": Entry("True", "torch/csrc/distributed/c10d/Work.hpp", waits="until it has ended"),
}

NCCL = {
    "torch.distributed.ProcessGroupNCCL": Entry(
        "a group that is not connected: NCCL is, in the first collective (initNCCLComm). Starts a watchdog thread,"
        " which sees errors and timeouts of eager collectives, and a thread that watches the watchdog. ValueError"
        " without a device",
        f"{_GROUP}: ProcessGroupNCCL, Watchdog, HeartbeatMonitor",
        cuda_build=True,
    ),
    "torch.distributed.ProcessGroupNCCL.Options": Entry("its options", f"{_GROUP}: Options", cuda_build=True),
    "torch.distributed.ProcessGroupNCCL.Options._timeout": Entry(
        "limit of collectives, for the watchdog; and of abort's wait before it raises",
        f"{_GROUP}: checkTimeout, abort",
        cuda_build=True,
    ),
    "torch.distributed.ProcessGroupNCCL.allreduce": Entry(
        "None if asyncOp is False: the collective is queued on the current stream. Eager ones are told to the"
        " watchdog, ones that are captured are not. ValueError for tensors that are not contiguous or not on a device",
        f"{_GROUP}: allreduce, collective (`return asyncOp ? work : nullptr`), getNCCLComm",
        since="torch 2.8",
        waits="the group's mutex, which abort holds until it returns; the first one waits for all ranks",
        thread="one at a time",
        cuda_build=True,
    ),
    "torch.distributed.ProcessGroupNCCL._allgather_base": Entry(
        "as allreduce: (output, input), output of as many elements as all inputs, which lie in it in rank order",
        f"{_GROUP}: _allgather_base",
        since="torch 2.8",
        waits="as allreduce",
        thread="one at a time",
        cuda_build=True,
    ),
    "torch.distributed.ProcessGroupNCCL.abort": Entry(
        "None. Kernels on the device end without an error, with anything in their tensors. Later collectives raise",
        f"{_GROUP}: abort, abortComms, waitForFutureOrTimeout; {_INIT}: ncclCommAbort, commReclaim, commDestroySync",
        waits="until every graph that captured a collective of the group is destroyed (`while"
        " (comm->localPersistentRefs != 0)`), with the group's mutex held; the future it raises a timeout for is"
        " waited for as well",
        frees="the connections",
        thread="any; the interpreter's lock is released meanwhile",
        cuda_build=True,
    ),
}

SHARED = {
    "torch.distributed._symmetric_memory._SymmetricMemory": Entry(
        "memory of all ranks of a group, as one rank sees it", f"{_BINDINGS}: _SymmetricMemory"
    ),
    "torch.distributed._symmetric_memory._SymmetricMemory.empty_strided_p2p": Entry(
        "a tensor in memory that other processes can map, with signals of zero; not from the caching allocator",
        f"{_SHARED}/SymmetricMemory.cpp: empty_strided_p2p; CUDASymmetricMemory.cu:"
        " CUDASymmetricMemoryAllocator::alloc",
        waits="the stream",
        frees="with the tensor and its handles, after the device has ended all work (~AllocationRef)",
    ),
    "torch.distributed._symmetric_memory._SymmetricMemory.rendezvous": Entry(
        "a handle, the same one for the same tensor and name. RuntimeError if the name is of no registered group, sizes"
        " differ, two ranks have one device, a rank does not come within the store's time limit, or"
        " $TMPDIR/symm_mem-PID cannot be bound",
        f"{_SHARED}/CUDASymmetricMemory.cu: make_peer_alloc_info, validate_rendezvous_requests;"
        " CUDASymmetricMemoryUtils.cpp: IpcChannel, StoreExchange (keys have the number of the exchange)",
        waits="all ranks, with the interpreter's lock held; the exchange of descriptors has no limit",
    ),
    "torch.distributed._symmetric_memory._SymmetricMemory.get_signal_pad": Entry(
        "the signals of a rank, in its memory", f"{_SHARED}/SymmetricMemory.cpp: get_signal_pad"
    ),
    "torch.distributed.ProcessGroup": Entry("a group without backends: rank, size and store", _BINDINGS),
    "torch.distributed.distributed_c10d._register_process_group": Entry(
        "None: the group has the name in this process, as long as it lives",
        "torch/csrc/distributed/c10d/GroupRegistry.cpp: register_group",
    ),
    "torch.distributed.distributed_c10d._unregister_process_group": Entry(
        "None", "torch/csrc/distributed/c10d/GroupRegistry.cpp: unregister_group"
    ),
}

NVML = {
    "pynvml.nvmlInit": Entry("None; NVMLError without a driver. Makes no context", f"{_NVML}: nvmlInit_v2"),
    "pynvml.nvmlShutdown": Entry("None", f"{_NVML}: nvmlShutdown"),
    "pynvml.nvmlDeviceGetCount": Entry(
        "number of devices, whatever CUDA_VISIBLE_DEVICES says; in a container those that it was given",
        f"{_NVML}: nvmlDeviceGetCount_v2",
    ),
    "pynvml.nvmlDeviceGetHandleByIndex": Entry(
        "a handle; the order is that of PCI", f"{_NVML}: nvmlDeviceGetHandleByIndex_v2"
    ),
    "pynvml.nvmlDeviceGetMemoryInfo": Entry(
        "total, used and free bytes; NVMLError for a slice of a device without the right to ask",
        f"{_NVML}: nvmlDeviceGetMemoryInfo",
    ),
    "pynvml.NVMLError": Entry("base of its errors", "pynvml.py: NVMLError"),
}

NAMES = DEVICES | MEMORY | STREAMS | GRAPHS | RANDOM | DISTRIBUTED | NCCL | SHARED | NVML
"""Entries by full name; a keyword argument ends with `=`."""

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": Entry(
        "numbers, or UUIDs (`GPU-…`, `MIG-…`); a wrong one ends the list", f"{_CUDA}: _parse_visible_devices"
    ),
    "PYTORCH_NVML_BASED_CUDA_CHECK": Entry("1: is_available asks NVML", f"{_CUDA}: _nvml_based_avail"),
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": Entry(
        "1: flash attention is tried before cuDNN's", "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
    ),
    "NCCL_DEBUG": Entry("INFO: NCCL tells what it does", "NCCL src/debug.cc"),
    "NCCL_SOCKET_IFNAME": Entry(
        "interface of its sockets; `=lo` is that one exactly", "NCCL src/misc/socket.cc: ncclFindInterfaces"
    ),
    "NCCL_MULTI_RANK_GPU_ENABLE": Entry(
        "1: ranks of one host may have the same device; 0, the default: an error (invalid usage)",
        f"{_INIT}: initTransportsRank",
        since="NCCL 2.30",
    ),
    "NCCL_P2P_DISABLE": Entry(
        "1: no copies between devices, but by way of the host", "NCCL src/graph/paths.cc: ncclTopoUserP2pLevel"
    ),
    "NCCL_RAS_ENABLE": Entry(
        "0: no service that listens on a port of its own", "NCCL src/ras/ras.cc: RasEnable", since="NCCL 2.24"
    ),
    "TORCH_CPP_LOG_LEVEL": Entry(
        "lowest level of the lines that C++ code logs, read at the import of torch: WARNING by default. FATAL: nothing"
        " but the last words of a process",
        "c10/util/Logging.cpp: setLogLevelFlagFromEnv",
    ),
    "TORCH_FR_BUFFER_SIZE": Entry(
        "events that the flight recorder keeps, 2000 by default; 0: none",
        "torch/csrc/distributed/c10d/FlightRecorder.hpp",
        since="torch 2.10",
    ),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Entry(
        "the same, by its old name", "torch/csrc/distributed/c10d/FlightRecorder.hpp"
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Entry(
        "3 by default: the watchdog, after a collective failed or timed out, waits four times"
        " TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC and ends the process. 0: it says so in the log, and goes on",
        f"{_GROUP}: Watchdog::runLoop, WorkNCCL::handleException, SHOULD_TEAR_DOWN",
    ),
    "NCCL_ASYNC_ERROR_HANDLING": Entry("the same, by its old name", "ProcessGroupNCCL.hpp"),
    "TORCH_NCCL_ENABLE_MONITORING": Entry(
        "1 by default: a thread ends the process if the watchdog does nothing for 480 s",
        f"{_GROUP}: HeartbeatMonitor::runLoop",
    ),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": Entry("15000 by default, see above", f"{_GROUP}: HeartbeatMonitor"),
    "TORCH_NCCL_RANKS_PER_ROOT": Entry(
        "128 by default: with more ranks several of them set an id in the store", f"{_GROUP}: initNCCLComm"
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Entry(
        "1: torchrun's agent has its own store", "torch/distributed/rendezvous.py"
    ),
}
"""Environment variables that the package sets, or names to its users."""


def missing() -> list[str]:
    """Return the table's names that the installed torch lacks; a build with CUDA must have all names."""
    return [name for name in NAMES if not name.endswith("=") and not _exists(name)]


def _exists(name: str) -> bool:
    parts = name.split(".")
    value: Any = None
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[count:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
