"""The project's own rules about its code: lint, types, sizes, and nothing that only works on one machine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = [*(ROOT / "mcore_agent").rglob("*.py"), *(ROOT / "ckpt_convert").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]


def run(*words: str) -> None:
    out = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stdout + out.stderr


def test_ruff():
    run("ruff", "check", ".")


def test_types():
    run("mypy")


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path):
    text = path.read_text()
    assert text.count("\n") <= 400, "split the file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"  # type: ignore[operator]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            assert len(node.args) == 2, f"line {node.lineno}: getattr with a default hides a missing field"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
            reraises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            assert not broad or reraises, f"line {node.lineno}: a catch names its exception"


def test_variant_names_stay_in_their_folders():
    """A stage that asks for a variant's name has a branch where a protocol should be (M114)."""
    from mcore_agent.registry import FOLDERS, variants

    compared: dict[str, list[tuple[Path, int]]] = {}  # texts that something is compared with
    for path in (ROOT / "mcore_agent").rglob("*.py"):
        if path.name not in ("config.py", "config_rules.py"):  # a default may name a variant
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    texts = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
                    for text in texts:
                        compared.setdefault(text, []).append((path, node.lineno))
    wrong = [
        f"{path.relative_to(ROOT)}:{line} compares with {kind} {name!r}"
        for kind, folder in FOLDERS.items()
        for name in variants(kind)
        for path, line in compared.get(name, ())
        if ROOT / folder.replace(".", "/") not in path.parents
    ]
    assert not [w for w in wrong if "stage.kind" not in w], "\n".join(wrong)
