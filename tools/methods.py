"""Writes docs/methods.md from the code and its tests: ``python tools/methods.py``, or ``--check`` to see whether it is up to date.

A module cites a method in the first line of its docstring, ``What it is (M12; RLOO, 2402.14740 sec. 2.1)``, and a test
anywhere in its text. What no variant is, or what its first line cannot say, is in ``BESIDE``; what is still to come in
``planned_methods.py``.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mcore_agent import registry  # noqa: E402
from tools.planned_methods import PLANNED  # noqa: E402

PAGE = ROOT / "docs" / "methods.md"
CITED = re.compile(r"\(([^()]*\bM\d+\b[^()]*)\)")
NUMBER = re.compile(r"\bM(\d+)\b")
HEAD = """# Methods

Numbers are this project's own names for methods of the literature; tests and docstrings cite them. "key" is where a recipe
turns the method on. `python tools/methods.py` writes this page from the docstrings, the registries and the tests.

| number | method | source | module | key | test | status |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Beside:
    """What the docstrings do not say of a method: a field stands in place of what was found; modules come before those that cite."""

    method: str = ""
    source: str = ""
    key: str = ""
    modules: tuple[str, ...] = ()  # below mcore_agent
    tests: tuple[str, ...] = ()  # below tests
    lacks: str = ""  # why no recipe can turn it on yet


BESIDE: Mapping[int, Beside] = {
    1: Beside("Loss only on tokens that the policy sampled", "PPO for language agents", "always on", ("types", "agent/episode")),
    2: Beside("Mask applied before the ratio", "PPO for language agents", "always on", ("loss/ppo_clip",)),
    3: Beside("Masked clipped surrogate, dual clip", "PPO 1707.06347, 1912.09729"),
    4: Beside(source="GAE 1506.02438 eq. 16"),
    8: Beside(source="Schulman's note on KL estimates, GRPO 2402.03300 eq. 4"),
    9: Beside("Group-normalized outcome advantage"),
    10: Beside("Groups without spread", "DAPO 2503.14476", "`zero_sigma`, `sigma_min` of `grpo`"),
    14: Beside("Clip-higher", key="`clip_low`, `clip_high` of a loss with a ratio"),
    16: Beside("Token mean over the global batch", "DAPO 2503.14476", "`aggregate: token_mean`"),
    20: Beside("The clipped surrogate with one ratio for a whole episode; dual clip", modules=("loss/gspo", "loss/ppo_clip"),
               tests=("loss/test_sequence_ratio.py", "loss/test_ppo_clip.py")),
    23: Beside(source="A3C 1602.01783"),
    24: Beside("Critic of its own or value head on the policy, clipped squared error", "PPO 1707.06347",
               "`critic.mode: separate`, `shared`", ("critic", "learner/value", "loss/value_mse"),
               ("learner/test_value.py", "e2e/test_critic.py", "credit/test_gae.py")),
    25: Beside("Aggregation modes", "Dr. GRPO 2503.20783 and others", "`aggregate` of a loss term", tests=("loss/test_aggregate.py",)),
    30: Beside("Imitation of demonstrations on assistant turns", "AgentTuning 2310.12823", "`stages: [{kind: sft}]`",
               ("loss/sft_nll", "batch/sft"), ("batch/test_sft.py",)),
    31: Beside("Imitation with negative examples: the loss is that of M30 on the right refusal", "Agent-FLAN 2403.12881",
               "`stages: [{kind: sft}]`, with such demonstrations", ("loss/sft_nll",), ("loss/test_terms.py",)),
    32: Beside("Importance correction for the gap between the policy that sampled and the one that learns: level, treatment and band",
               "TIS, IcePop, GSPO 2507.18071", "`correction: {treatment, level, low, high}`", ("loss/correction", "batch/correction")),
    35: Beside("Rollout beside training, whole groups, bounded staleness", "AReaL 2505.24298", "`rollout.max_lag`",
               ("rollout/collect", "rollout/buffer"), ("rollout/test_async_collect.py",)),
    36: Beside("Buffer, first in first out (no priority draws)", "AReaL 2505.24298", "`rollout.max_lag`", ("rollout/buffer",),
               ("rollout/test_async_collect.py",)),
    46: Beside("The value of each step, from playing on, or from a model", key="`reward: [{name: process_mc}]`, `reward: [{name: prm}]`"),
    67: Beside("A model of outcomes that answers yes or no", key="`reward: [{name: orm}]`"),
    96: Beside(key="`credit: [{name: sapo}, {name: standardize}]` with `critic: {mode: shared, detach: true}`",
               modules=("learner/value",), tests=("learner/test_value.py", "credit/test_sapo.py")),
    38: Beside(key="`rollout.prompts`, `rollout.group_size`", tests=("rollout/test_collect.py",)),
    52: Beside(key="`rollout.top_p`, `rollout.top_k`", tests=("rollout/test_sampling.py",)),
    93: Beside(lacks="prompts are not drawn by their weights yet"),
    94: Beside(lacks="prompts are not drawn by their weights yet"),
    99: Beside("Episodes that go on under newer weights, a version and a behaviour log-probability for each token, age limit", "Intern-S2",
               "`rollout.max_lag`, `correction.max_age`", ("rollout/flight", "batch/age"),
               ("rollout/test_pool.py", "batch/test_correction.py")),
    112: Beside("Requests outlive their engine: asked again elsewhere with the same tokens and seed, or continued from kept ones",
                "Belayer", "always on", ("rollout/pool", "rollout/watch", "serving"),
                ("rollout/test_pool_faults.py", "e2e/test_engine_faults.py")),
    114: Beside("Nobody outside a variant's folder asks for its name; no token is trained that was not sampled", "Molt", "always on",
                ("registry", "types")),
    115: Beside("Placement by cached prefix, progress and load; drafts from the suffixes of finished episodes, verified without loss",
                "WAR, SuffixDecoding 2411.04975", "`rollout.options: {drafting: true}`",
                ("rollout/router", "rollout/drafting", "rollout/switch"), ("rollout/test_router.py", "rollout/test_drafting.py")),
    116: Beside("Muon, scale by fan-in or by matched RMS", "Muon 2502.16982", "`learner: {optimizer: muon, scale: …}`", ("learner/muon",),
                ("learner/test_muon.py",)),
    133: Beside("Loss terms that are off leave every bit as it was", "CRAFT", "`coef: 0`", ("loss/total",),
                ("invariants/test_off_switch.py",)),
}  # fmt: skip


@dataclass(frozen=True)
class Citation:
    """What the first line of a module's docstring says of a method."""

    number: int
    method: str
    source: str
    module: str  # path below the root


def citations(module: str, line: str) -> Iterator[Citation]:
    """Of one line: the words before each bracket are the method, what follows the numbers in it the source.

    ``The clipped surrogate (M3; PPO, 1707.06347) with clip-higher (M14; DAPO)`` cites 3, of PPO, and 14, of DAPO.
    """
    start = 0
    for match in CITED.finditer(line):
        words = re.sub(r"^[\s,;:.]*(with|and)?\s+|^[\s,;:.]+", "", line[start : match.start()]).strip()
        parts = [part.strip() for part in match[1].split(";")]
        source = "; ".join(part for part in parts if re.sub(r"\b[MI]\d+\b|,|\s|and", "", part))
        start = match.end()
        for number in NUMBER.findall(match[1]):
            yield Citation(int(number), words[:1].upper() + words[1:], source, module)


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")


def key_of(kind: str, name: str) -> str:
    """What a recipe says to turn a variant on."""
    if kind == "aggregation":
        return f"`aggregate: {name}`"
    if kind in ("env", "engine", "source", "parser"):
        return f"`{kind}: {name}`"
    if registry.FOLDERS[kind] != registry.FOLDERS["estimator"]:
        return f"`{kind}: [{{name: {name}}}]`"
    critic = " with `critic.mode`" if {"values", "values_behind"} & set(registry.get(kind, name).needs) else ""
    return f"`credit: [{{name: {name}}}]`{critic}"


def names_by_module() -> dict[str, list[tuple[str, str]]]:
    """Path of a module -> (kind, name) of the variants in it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind in registry.FOLDERS:
        for name, variant in registry.variants(kind).items():
            found.setdefault(variant.__module__.replace(".", "/") + ".py", []).append((kind, name))
    return found


def tests_of(number: int, modules: list[str], names: list[str], texts: Mapping[str, str]) -> list[str]:
    """Tests that cite the number; if there is none, those that import one of the modules or make one of the variants."""
    cite = [path for path, text in texts.items() if re.search(rf"\bM{number}\b", text)]
    if cite:
        return cite
    dotted = [module.removesuffix(".py").replace("/", ".") for module in modules]
    wanted = [rf"\b{re.escape(module)}\b" for module in dotted] + [rf'"name": "{name}"' for name in names]
    return [path for path, text in texts.items() if any(re.search(pattern, text) for pattern in wanted)]


def row(number: int, cited: list[Citation], names: Mapping[str, list[tuple[str, str]]], texts: Mapping[str, str]) -> str:
    """One line of the table."""
    beside = BESIDE.get(number, Beside())
    given = [f"mcore_agent/{module}.py" for module in beside.modules]
    modules = list(dict.fromkeys([*given, *(c.module for c in cited)]))
    missing = [path for path in (*given, *(f"tests/{test}" for test in beside.tests)) if not (ROOT / path).exists()]
    if missing:
        raise SystemExit(f"tools/methods.py names {missing[0]} for M{number}, and there is no such file")
    planned = PLANNED.get(number, ("", ""))
    method = beside.method or "; ".join(dict.fromkeys(c.method for c in cited)) or planned[0]
    source = beside.source or "; ".join(dict.fromkeys(c.source for c in cited if c.source)) or planned[1]
    own = [variant for c in cited for variant in names.get(c.module, [])]
    key = beside.key or ", ".join(dict.fromkeys(key_of(*variant) for variant in own))
    if not modules:
        return f"| M{number} | {method} | {source} | | | | not yet |"
    tests = [f"tests/{test}" for test in beside.tests] or tests_of(number, modules, [name for _, name in own], texts)
    status = f"built; {beside.lacks}" if beside.lacks else "built"
    return f"| M{number} | {method} | {source} | {_ticked(modules)} | {key} | {_ticked(tests)} | {status} |"


def _ticked(paths: Iterable[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def page(root: Path = ROOT) -> str:
    """The whole page. ``root`` is where modules and tests are looked for."""
    cited: dict[int, list[Citation]] = {}
    for path in files(root / "mcore_agent"):
        for citation in citations(str(path.relative_to(root)), first_line(path)):
            cited.setdefault(citation.number, []).append(citation)
    texts = {str(path.relative_to(root)): path.read_text() for path in files(root / "tests") if path.name != "test_methods.py"}
    names = names_by_module()
    return HEAD + "".join(f"{row(number, cited.get(number, []), names, texts)}\n" for number in sorted({*cited, *BESIDE, *PLANNED}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    made, there = page().splitlines(), PAGE.read_text().splitlines()
    wrong = [line for line in made if line not in there] + [line for line in there if line not in made]
    if made != there:
        print("\n".join(["docs/methods.md is not up to date; run: python tools/methods.py", *wrong[:10]]))
    return int(made != there)


if __name__ == "__main__":
    sys.exit(main())
