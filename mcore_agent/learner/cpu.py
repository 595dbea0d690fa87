"""Adapts the unmodified PyPI megatron-core 0.19.2 to a machine without CUDA. With a GPU it changes nothing.

``install()`` must run before the first import of ``megatron``. Every function below replaces one assumption of
that release (and of torch 2.14's CUDA module, which Megatron calls directly); ``tests/learner/test_cpu.py``
fails once an assumption is gone from the installed release, so that the patch can go too.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RELEASE = "0.19.2"  # the megatron-core that every patch here was written for

CPU = torch.device("cpu")
FACTORIES = (
    ("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "linspace", "eye")
    + ("empty_like", "zeros_like", "ones_like", "full_like")
)  # fmt: skip


def install() -> bool:
    """Installs the adaptation; True when this call did it, False with a GPU or when it was there already.

    Raises RuntimeError when megatron was imported first: its modules would hold unpatched names.
    """
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return False
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron was imported before mcore_agent.learner.cpu.install(); import the learner first")
    _hide_flash_mla()
    _patch_device_queries()
    _patch_streams()
    _patch_generators()
    _patch_movers()
    _patch_factories()
    _patch_type_strings()
    _stub_triton()
    _import_without_compile()
    _patch_megatron_rng()
    _patch_all_to_all_splits()
    _patch_uneven_gathers()
    return True


class Stream:
    """Stands for a CUDA stream or event where work is done by the time a call returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: "Stream | None" = None) -> "Stream":
        return event or Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "Stream") -> float:
        return 0.0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Generators:
    """``torch.cuda.default_generators[any index]`` is the CPU generator."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _current_device() -> torch.device:
    return CPU


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int):
        return not isinstance(device, bool)
    return str(device).startswith("cuda")


def _hide_flash_mla() -> None:
    """0.19.2 imports ``flash_mla`` when it finds it; SGLang's build of it dies with OSError without a driver."""
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]


def _patch_device_queries() -> None:
    """0.19.2 passes ``torch.cuda.current_device()`` as the device of parameters, buffers and messages."""
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None
    torch.cuda.get_device_capability = lambda *_: (0, 0)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda *_: "cpu"  # type: ignore[assignment]


def _patch_streams() -> None:
    """0.19.2 synchronizes, opens streams, reads memory figures and marks nvtx ranges without asking for a GPU."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.ExternalStream = Stream
    here = Stream()
    cuda.current_stream = cuda.default_stream = lambda *_, **__: here
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None


def _patch_generators() -> None:
    """0.19.2 keeps its random states in the CUDA generator; here that is the CPU generator."""
    patches: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    }
    for name, function in patches.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.random, name, function)
    torch.cuda.default_generators = _Generators()  # type: ignore[assignment]


def _patch_movers() -> None:
    """0.19.2 calls ``.cuda()``, ``.to("cuda")`` and ``.pin_memory()`` on tensors that are where they should be."""
    original = torch.Tensor.to

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device)) and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]


def _patch_factories() -> None:
    """0.19.2 writes ``device="cuda"`` and ``pin_memory=True`` into tensor factories (schedules, clipping, p2p)."""

    def on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = CPU
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
            return original(*args, **kwargs)

        return factory

    # ``with torch.device(...)`` knows factories by identity and lists them on first use: that must be the originals.
    importlib.import_module("torch.utils._device")._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_type_strings() -> None:
    """0.19.2's optimizers compare ``tensor.type()`` with ``torch.cuda.*`` strings (clip_grads, distrib_optimizer).

    They know no float64, which tests compute in: it passes for float32, the other type that needs no master copy.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1).replace("DoubleTensor", "FloatTensor")
        return result

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]


def _stub_triton() -> None:
    """0.19.2's ``paged_stash.py`` imports triton unguarded. Where it is absent, that one file loads under a stub.

    The file is loaded by its path, before its package, and the stub is hidden again at once: everything else still
    sees that there is no triton.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    import torch._dynamo  # noqa: F401  must not look for triton for the first time while the stub is there

    core = importlib.util.find_spec("megatron")
    if core is None or not core.submodule_search_locations:
        raise ModuleNotFoundError(f"megatron-core=={RELEASE} is not installed; pip install -c constraints.txt megatron-core")
    path = Path(next(iter(core.submodule_search_locations)), "core/transformer/moe/ops/paged_stash.py")
    stubs: dict[str, Any] = {name: types.ModuleType(name) for name in ("triton", "triton.language")}
    for name, module in stubs.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    stubs["triton"].language = stubs["triton.language"]
    stubs["triton"].jit = lambda function=None, **_: function if function is not None else (lambda inner: inner)
    stubs["triton"].__path__ = []
    stubs["triton.language"].constexpr = object
    sys.modules.update(stubs)
    try:
        _load("megatron.core.transformer.moe.ops.paged_stash", path)
    finally:
        for name in stubs:
            del sys.modules[name]


def _load(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _import_without_compile() -> None:
    """0.19.2 binds ``torch.compile`` to its small functions while it is imported; that wants a compiler at run time."""
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function if function is not None else (lambda inner: inner)  # type: ignore
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compile_  # type: ignore[assignment]
    sys.modules["megatron.core.jit"].disable_jit_fuser()


def _patch_megatron_rng() -> None:
    """0.19.2's own random-state helpers wait for CUDA's lazy initialization."""
    import megatron.core.tensor_parallel.random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _patch_all_to_all_splits() -> None:
    """0.19.2's ``maybe_move_tensor_to_cpu`` makes numpy split sizes only of CUDA tensors; all-to-all needs numbers."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _patch_uneven_gathers() -> None:
    """0.19.2 gathers and scatters parts of different sizes (tokens of split experts), which only NCCL can do; all-to-all can."""
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        out = input_.new_empty((sum(sizes), *input_.shape[1:]))
        everyone = input_.contiguous().repeat(group.size(), *[1] * (input_.dim() - 1))
        torch.distributed.all_to_all_single(out, everyone, sizes, [len(input_)] * group.size(), group=group)
        return out

    def scatter(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(n) for n in input_split_sizes]
        own = sizes[group.rank()]
        parts = input_.new_empty((own * group.size(), *input_.shape[1:]))
        torch.distributed.all_to_all_single(parts, input_.contiguous(), [own] * group.size(), sizes, group=group)
        return parts.unflatten(0, (group.size(), own)).sum(0)

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter
