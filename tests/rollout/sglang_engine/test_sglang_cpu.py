"""The adaptation for machines without a GPU: it is needed, it is for this release, and it does nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mcore_agent.rollout
from mcore_agent.rollout.sglang.options import RELEASE
from mcore_agent.rollout.sglang.server import _environment
from tests.required import need

FOLDER = Path(mcore_agent.rollout.__file__).parent / "sglang_cpu"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def python(code: str, adapted: bool) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER) if adapted else ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@needs_no_gpu
def test_it_is_still_needed():
    """Fails once SGLang's kernels can be imported, and torch asked to synchronize, without a driver: then the folder can go."""
    need("sglang")
    assert python("import sgl_kernel", adapted=False).returncode != 0
    assert python("import torch; torch.cuda.synchronize()", adapted=False).returncode != 0


@needs_no_gpu
def test_it_gives_names_and_refuses_calls():
    code = (
        "import sgl_kernel, torch\n"
        "from sgl_kernel.gemm import fp8_scaled_mm\n"
        "from sgl_kernel import Anything, top_k\n"
        "assert isinstance(Anything, type)\n"
        "torch.cuda.synchronize(); torch.cuda.empty_cache()\n"
        "for f in (fp8_scaled_mm, top_k):\n"
        "    try:\n"
        "        f(1)\n"
        "    except RuntimeError as e:\n"
        "        assert 'no GPU' in str(e), e\n"
        "    else:\n"
        "        raise SystemExit('it was called')\n"
        "import numpy; assert numpy.__file__ != '<absent>'\n"
    )
    done = python(code, adapted=True)
    assert done.returncode == 0, done.stderr


def test_it_is_for_the_release_that_the_engine_needs():
    assert f'RELEASE = "{RELEASE}"' in (FOLDER / "sitecustomize.py").read_text()


def test_servers_with_a_gpu_do_not_see_it():
    assert str(FOLDER) in _environment(Path("/f"), cuda=False)["PYTHONPATH"]
    assert str(FOLDER) not in _environment(Path("/f"), cuda=True)["PYTHONPATH"]
