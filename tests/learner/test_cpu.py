"""Each patch of cpu.py and repairs.py is for something that is still in the installed release; else it must go."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_agent.learner import cpu, repairs

ROOT = Path(__file__).parents[2]
MEGATRON = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations))) / "core"  # type: ignore[union-attr]


def test_written_for_the_installed_release():
    assert importlib.metadata.version("megatron-core") == cpu.RELEASE == repairs.RELEASE


ASSUMPTIONS = {
    "_patch_device_queries": ("transformer/moe/router.py", r"device=torch\.cuda\.current_device\(\)"),
    "_patch_streams": ("pipeline_parallel/p2p_communication.py", r"torch\.cuda\.synchronize\(\)"),
    "_patch_generators": ("tensor_parallel/random.py", r"torch\.cuda\.manual_seed\("),
    "_patch_movers": ("optimizer/clip_grads.py", r"device='cuda'"),
    "_patch_factories": ("pipeline_parallel/schedules.py", r'torch\.zeros\(\[\], dtype=torch\.int, device="cuda"\)'),
    "_patch_type_strings": ("optimizer/clip_grads.py", r"\.type\(\) == 'torch\.cuda\.FloatTensor'"),
    "_stub_triton": ("transformer/moe/ops/paged_stash.py", r"^import triton$"),
    "_import_without_compile": ("jit.py", r"^enable_jit_fuser\(\)$"),
    "_patch_megatron_rng": ("tensor_parallel/random.py", r"_lazy_call\(cb\)"),
    "_patch_all_to_all_splits": ("transformer/moe/moe_utils.py", r"torch\.is_tensor\(tensor\) and tensor\.is_cuda"),
    "_patch_uneven_gathers": ("tensor_parallel/mappings.py", r"torch\.distributed\.all_gather\(output_tensor_list, input_, group=group\)"),
}


@pytest.mark.parametrize("patch", ASSUMPTIONS)
def test_assumption_is_still_there(patch):
    file, pattern = ASSUMPTIONS[patch]
    assert hasattr(cpu, patch)
    assert re.search(pattern, (MEGATRON / file).read_text(), re.MULTILINE), f"{file} no longer needs cpu.{patch}"


def test_every_patch_is_listed():
    called = re.findall(r"^    (_\w+)\(\)$", Path(cpu.__file__).read_text().split("\ndef install")[1].split("\nclass ")[0], re.M)
    assert set(called) == {*ASSUMPTIONS, "_hide_flash_mla"}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_works_without_triton():
    """The CPU build of torch does not bring triton; importing Megatron must not need it."""
    code = """
import importlib.util, sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTriton())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
from mcore_agent.learner import model
print("triton" in sys.modules, sys.modules["flash_mla"])
"""
    assert python(code) == "False None"


def test_refuses_to_come_late():
    code = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try:
    import mcore_agent.learner
except RuntimeError as e:
    print(e)
"""
    assert "imported before" in python(code)


def test_changes_nothing_with_a_gpu():
    code = """
import torch
torch.cuda.is_available = lambda: True
before = (torch.cuda.current_device, torch.Tensor.to, torch.zeros, torch.Tensor.type)
import importlib.util, sys, types
package = types.ModuleType("mcore_agent.learner")
package.__path__ = [importlib.util.find_spec("mcore_agent").submodule_search_locations[0] + "/learner"]
sys.modules["mcore_agent.learner"] = package
from mcore_agent.learner import cpu
print(cpu.install(), before == (torch.cuda.current_device, torch.Tensor.to, torch.zeros, torch.Tensor.type))
"""
    assert python(code) == "False True"
