"""A file imports only from its own package or a lower layer, and the package itself is light to import."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

LAYERS = (
    {"types", "protocols", "registry", "metrics", "state", "sandbox", "layout", "processes", "ckpt_convert"},
    {"task", "env", "reward", "credit", "loss", "context"},
    {"config", "config_rules", "config_losses", "mismatch", "precision", "batch", "agent"},
    {"rollout", "learner", "weights"},
    {
        *("loop", "session", "lead", "policy", "serving", "coordinator", "engines", "host", "parcel", "critic", "teacher", "offline"),
        *("plan_report", "memory_plan", "summary"),
    },
    {"cli", "launch"},
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str | None:
    """The part of the project that a dotted module name belongs to; None for other packages and for the package itself."""
    names = module.split(".")
    if names[0] == "ckpt_convert":
        return "ckpt_convert"
    return names[1] if names[0] == "mcore_agent" and len(names) > 1 else None


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(f"{node.module}.{a.name}", node.lineno) for a in node.names]
    return found


def files() -> list[Path]:
    return [*(ROOT / "mcore_agent").rglob("*.py"), *(ROOT / "ckpt_convert").rglob("*.py")]


def owner(path: Path) -> str | None:
    relative = path.relative_to(ROOT).with_suffix("")
    return part_of(".".join(relative.parts))


def test_every_part_has_a_layer():
    parts = {owner(p) for p in files()} - {None, "__init__"}
    assert parts <= RANK.keys(), f"give these a layer: {sorted(parts - RANK.keys())}"  # type: ignore[type-var]


def test_imports_point_downwards():
    wrong = []
    for path in files():
        here = owner(path)
        if here in (None, "__init__") or path.name == "__main__.py":  # command lines drive everything, lazily
            continue
        for module, line in imports(path):
            there = part_of(module)
            if there not in RANK or there == here:
                continue
            # in the lowest layer types, protocols and processes are below the rest
            same = RANK[there] == RANK[here] == 0 and there in ("types", "protocols", "processes") and here != "types"
            siblings = RANK[there] == RANK[here] and RANK[here] in (2, 4, 5) and here != there
            if RANK[there] >= RANK[here] and not same and not (siblings and {here, there} <= LAYERS[RANK[here]] - {"batch", "agent"}):
                wrong.append(f"{path.relative_to(ROOT)}:{line} {here} imports {there}")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_where_they_belong():
    allowed = {
        "megatron": {"learner", "weights"},
        "sglang": {"rollout"},
        "transformers": {"agent", "rollout", "lead", "coordinator", "offline", "ckpt_convert"},
    }
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files()
        for module, line in imports(path)
        if (top := module.split(".")[0]) in allowed and owner(path) not in allowed[top] and path.name != "__main__.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_package_is_light():
    code = (
        "import sys, time; t = time.perf_counter(); import mcore_agent; d = time.perf_counter() - t;"
        "print([m for m in ('torch', 'megatron', 'sglang', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
