"""Which precision a model can be trained in, on which GPU. Pure and light: ``check`` asks it about machines it is not on.

FP8 runs through Transformer Engine (2209.05433): only the matrix products of the layers are FP8; attention, norms,
embedding, head, gradients and optimizer state are not.
"""

from dataclasses import dataclass

from ckpt_convert.hfconfig import Arch
from mcore_agent.config import ConfigError

RECIPES = ("off", "delayed", "current", "blockwise", "mxfp8")
FORMATS = ("hybrid", "e4m3")
# Transformer Engine's own conditions on the compute capability and megatron-core 0.19.2's on its version.
CAPABILITY = {"delayed": (8, 9), "current": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
BEYOND = {"mxfp8": (12, 0)}  # from here on Transformer Engine lacks some layouts of the product
ENGINE = {"delayed": (1, 11), "current": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 1)}
CUDA = {"delayed": (12, 1), "current": (12, 1), "blockwise": (12, 9), "mxfp8": (12, 8)}
MIB = 1 << 20


@dataclass(frozen=True)
class PrecisionSpec:
    """The keys of ``precision``.

    ``fp8_edge_bf16`` layers at either end of the model stay in bf16. ``fp8_params``: the weights of FP8 products are
    kept and gathered in FP8, beside fp32 master weights, which begin at what FP8 has left of the loaded weights.
    """

    dtype: str = "fp32"
    fp8: str = "off"
    fp8_format: str = "hybrid"  # e4m3, and e5m2 for gradients of activations; or e4m3 for all
    fp8_edge_bf16: int = 0
    fp8_params: bool = False


@dataclass(frozen=True)
class GpuType:
    """One GPU. Peaks are of dense matrix products, from the vendor's data sheets (SXM where there are several)."""

    name: str
    memory: int  # bytes, all that the driver reports
    bf16: float  # FLOP/s
    fp8: float  # FLOP/s, 0: has none
    capability: tuple[int, int]


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuType("A100-40", 40960 * MIB, 312e12, 0.0, (8, 0)),
        GpuType("A100-80", 81920 * MIB, 312e12, 0.0, (8, 0)),
        GpuType("L40S", 46068 * MIB, 362e12, 733e12, (8, 9)),
        GpuType("H20", 97871 * MIB, 148e12, 296e12, (9, 0)),
        GpuType("H100", 81559 * MIB, 989e12, 1979e12, (9, 0)),
        GpuType("H200", 143771 * MIB, 989e12, 1979e12, (9, 0)),
        GpuType("B200", 183359 * MIB, 2250e12, 4500e12, (10, 0)),
    )
}


@dataclass(frozen=True)
class Machine:
    """What a run has, or is planned for. ``gpu`` None: CPU ranks."""

    gpu: GpuType | None = None
    engine: tuple[int, int] | None = None  # Transformer Engine's version, None: not installed
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True)
class Split:
    """What of a layout and an optimizer bears on precision."""

    tp: int = 1
    etp: int = 1
    pp: int = 1
    optimizer: str = "adamw"
    offload: bool = False  # of the optimizer's state


def planned(gpu: str) -> Machine:
    """A machine of a GPU of the table, in any spelling, with all software that it can use. Raises ConfigError for an unknown one."""
    found = {name.lower(): kind for name, kind in GPUS.items()}.get(gpu.lower())
    if found is None:
        raise ConfigError("--gpu", gpu, "not a GPU of the table", f"Choose one of {', '.join(GPUS)}")
    return Machine(found, max(ENGINE.values()), max(CUDA.values()))


def this_machine() -> Machine:
    """What is here; imports torch. A GPU outside the table has peaks 0."""
    import importlib.metadata

    import torch

    if not torch.cuda.is_available():
        return Machine()
    try:
        engine = _version(importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        engine = None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        GpuType(facts.name, facts.total_memory, 0.0, 0.0, (facts.major, facts.minor)),
        engine,
        _version(torch.version.cuda) if torch.version.cuda else None,
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check_precision(spec: PrecisionSpec, arch: Arch, split: Split, machine: Machine) -> None:
    """Raises ConfigError for the first rule that the precision breaks: key, value, reason, nearest legal choice."""
    _check_keys(spec)
    if spec.fp8 == "off":
        return
    _check_machine(spec, machine)
    _check_companions(spec, split)
    _check_edges(spec, arch, split)
    _check_sizes(spec, arch, split)


def _check_keys(spec: PrecisionSpec) -> None:
    if spec.fp8 not in RECIPES:
        raise ConfigError("precision.fp8", spec.fp8, "not a scaling recipe", f"Choose one of {', '.join(RECIPES)}")
    if spec.fp8_format not in FORMATS:
        raise ConfigError("precision.fp8_format", spec.fp8_format, "not an FP8 format", f"Choose one of {', '.join(FORMATS)}")
    if spec.fp8_edge_bf16 < 0:
        raise ConfigError("precision.fp8_edge_bf16", spec.fp8_edge_bf16, "it counts layers", "Give 0 or more")
    if spec.fp8 == "off":
        for key, value, default in (("fp8_edge_bf16", spec.fp8_edge_bf16, 0), ("fp8_params", spec.fp8_params, False),
                                    ("fp8_format", spec.fp8_format, "hybrid")):  # fmt: skip
            if value != default:
                raise ConfigError(f"precision.{key}", value, "has no effect while precision.fp8 is off",
                                  f"Use precision.{key}={str(default).lower()}, or choose a precision.fp8")  # fmt: skip


def _check_companions(spec: PrecisionSpec, split: Split) -> None:
    if spec.dtype != "bf16":
        raise ConfigError("precision.dtype", spec.dtype, f"precision.fp8={spec.fp8} rounds bf16 tensors to FP8",
                          "Use precision.dtype=bf16")  # fmt: skip
    if spec.fp8_params and split.optimizer != "adamw":
        raise ConfigError("precision.fp8_params", True, "only the distributed AdamW writes its master weights back as FP8, "
                          f"and learner.optimizer is {split.optimizer}", "Use precision.fp8_params=false")  # fmt: skip
    if spec.fp8_params and split.offload:
        raise ConfigError("precision.fp8_params", True, "megatron-core 0.19.2 writes no offloaded master weights back as FP8",
                          "Use precision.fp8_params=false or learner.offload=false")  # fmt: skip


def _check_machine(spec: PrecisionSpec, machine: Machine) -> None:
    gpu = machine.gpu
    if gpu is None:
        raise ConfigError("precision.fp8", spec.fp8, "FP8 needs a CUDA GPU, and this machine has none",
                          "Use precision.fp8=off; check --gpu plans for another machine")  # fmt: skip
    if machine.engine is None:
        raise ConfigError("precision.fp8", spec.fp8, "FP8 needs Transformer Engine, which is not installed",
                          "Install the extra mcore-agent[gpu], or use precision.fp8=off")  # fmt: skip
    runs = [name for name in RECIPES[1:] if _runs(name, gpu)]
    if spec.fp8 not in runs:
        need, beyond = CAPABILITY[spec.fp8], BEYOND.get(spec.fp8)
        limits = f"at least {_dotted(need)}" + (f" and below {_dotted(beyond)}" if beyond else "")
        raise ConfigError("precision.fp8", spec.fp8, f"it needs a compute capability of {limits}, and {gpu.name} has "
                          f"{_dotted(gpu.capability)}", f"Use precision.fp8={runs[-1] if runs else 'off'}")  # fmt: skip
    fits = [name for name in runs if machine.engine >= ENGINE[name] and (machine.cuda is None or machine.cuda >= CUDA[name])]
    if spec.fp8 not in fits:
        old_engine = machine.engine < ENGINE[spec.fp8]
        name, least = ("Transformer Engine", ENGINE[spec.fp8]) if old_engine else ("CUDA", CUDA[spec.fp8])
        here = machine.engine if old_engine else machine.cuda
        raise ConfigError("precision.fp8", spec.fp8, f"it needs {name} {_dotted(least)}, and {_dotted(here or (0, 0))} is here",
                          f"Update it, or use precision.fp8={fits[-1] if fits else 'off'}")  # fmt: skip


def _runs(recipe: str, gpu: GpuType) -> bool:
    return CAPABILITY[recipe] <= gpu.capability and (recipe not in BEYOND or gpu.capability < BEYOND[recipe])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _check_edges(spec: PrecisionSpec, arch: Arch, split: Split) -> None:
    edge = spec.fp8_edge_bf16
    if not edge:
        return
    if spec.fp8 == "delayed":
        raise ConfigError("precision.fp8_edge_bf16", edge, "delayed scaling spans all layers at once and leaves none out",
                          "Use precision.fp8_edge_bf16=0, or precision.fp8=current")  # fmt: skip
    most = min(arch.layers // split.pp, (arch.layers - 1) // 2)
    if edge > most:
        raise ConfigError("precision.fp8_edge_bf16", edge, f"{arch.layers} layers on {split.pp} pipeline stages leave room for "
                          f"{most} at either end", f"Use precision.fp8_edge_bf16={most}")  # fmt: skip


def alignment(fp8: str) -> int:
    """What the sizes of an FP8 product must be multiples of (megatron-core's ``get_fp8_align_size``); 1 without FP8."""
    return {"off": 1, "mxfp8": 32}.get(fp8, 16)


def token_multiple(fp8: str, tp: int, cp: int, sp: bool) -> int:
    """What the number of tokens of a micro-batch is padded to, so that every rank's share suits the FP8 products.

    The gradient of a weight sums over tokens, so that their number on a rank is an inner size too.
    """
    return alignment(fp8) * cp * (tp if sp else 1)


def _check_sizes(spec: PrecisionSpec, arch: Arch, split: Split) -> None:
    unit = alignment(spec.fp8)
    found = _odd_size(arch, split.tp, split.etp, unit)
    if found is None:
        return
    what, size = found
    ways = [f"precision.fp8={other}" for other in ("current",) if spec.fp8 == "mxfp8" and _odd_size(arch, split.tp, split.etp, 16) is None]
    for tp in range(split.tp - 1, 0, -1):
        etp = min(split.etp, tp)
        if split.tp % tp == 0 and _odd_size(arch, tp, etp, unit) is None:
            ways.append(f"learner.tp={tp}" + (f" learner.etp={etp}" if etp != split.etp else ""))
            break
    raise ConfigError("precision.fp8", spec.fp8, f"{what} is {size} on each rank, and an FP8 product takes sizes divisible by {unit}",
                      f"Use {' or '.join([*ways, 'precision.fp8=off'])}")  # fmt: skip


def _odd_size(arch: Arch, tp: int, etp: int, unit: int) -> tuple[str, str] | None:
    """The first inner or outer size of a layer's products, per rank, that ``unit`` does not divide."""
    queries, keys = arch.heads * arch.head_dim, arch.groups * arch.head_dim
    sizes = [
        ("the hidden size", arch.hidden, 1),
        (f"the query width ({arch.heads} heads of size {arch.head_dim} over tp={tp})", queries, tp),
        (f"the query-key-value width (head size {arch.head_dim} over tp={tp})", queries + 2 * keys, tp),
    ]
    if arch.experts:
        sizes.append((f"an expert's intermediate size (over etp={etp})", arch.expert_ffn, etp))
    else:
        sizes.append((f"the intermediate size (over tp={tp})", arch.ffn, tp))
    for what, size, ranks in sizes:
        if size % (ranks * unit):
            return what, str(size // ranks) if size % ranks == 0 else f"{size}/{ranks}"
    return None


def grouped_gemm(asked: str, dtype: str, machine: Machine) -> bool:
    """Whether a layer's experts are one grouped product. ``asked``: auto (wherever it can), on or off. Raises ConfigError.

    Only in bf16 (and in FP8, which rounds bf16): Transformer Engine computes products of fp32 matrices in TF32.
    """
    runs = machine.gpu is not None and machine.engine is not None and dtype == "bf16"
    if asked == "on" and not runs:
        lacks, way = "precision.dtype=bf16", "Use precision.dtype=bf16 or learner.grouped_gemm=auto"
        if machine.gpu is None or machine.engine is None:
            lacks = "a CUDA GPU" if machine.gpu is None else "Transformer Engine"
            way = "Use learner.grouped_gemm=auto"
        raise ConfigError("learner.grouped_gemm", asked, f"grouped products of experts need {lacks}", way)
    return runs and asked != "off"


def check_offload(dtype: str, machine: Machine) -> None:
    """Raises ConfigError where AdamW's state cannot move to host memory."""
    if machine.gpu is None:
        raise ConfigError("learner.offload", True, "this machine has no CUDA GPU: the optimizer is in host memory as it is",
                          "Use learner.offload=false")  # fmt: skip
    if dtype != "bf16":
        raise ConfigError("learner.offload", True, f"megatron-core 0.19.2 offloads master weights of bf16 parameters only, and "
                          f"precision.dtype is {dtype}", "Use precision.dtype=bf16 or learner.offload=false")  # fmt: skip
