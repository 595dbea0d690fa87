"""Runs one file of Python tests and reports how many passed (M39, M74): the other half of ``suite``, in the process of the tested code.

Whatever ends this process early, with status 0 or not, ends it before the report.
"""

import importlib.util
import inspect
import json
import os
import sys
import unittest
from typing import Any


class Counting(unittest.TestResult):
    """Counts the tests that pass; one with a subtest that fails does not."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.passed = 0

    def addSuccess(self, test: Any) -> None:
        """Called by unittest."""
        self.passed += 1


class Plugin:
    """The same for pytest, which reports setup, call, teardown and subtests of a test under one name."""

    def __init__(self) -> None:
        self.good: set[str] = set()
        self.bad: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest."""
        if report.failed:
            self.bad.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.good.add(report.nodeid)


def of_unittest(path: str) -> int:
    """Test cases and functions ``test…`` without arguments of a file, which is imported: its bare assertions count as none."""
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    for key, value in list(vars(module).items()):
        if key.startswith("test") and inspect.isfunction(value):
            suite.addTest(unittest.FunctionTestCase(value))
    result = Counting()
    suite.run(result)
    return result.passed


def of_pytest(path: str) -> int:
    """All tests of a file, as pytest finds them."""
    import pytest

    plugin = Plugin()
    pytest.main([path, "-q", "-p", "no:cacheprovider"], plugins=[plugin])
    return len(plugin.good - plugin.bad)


def main() -> None:
    """Reads what to run from stdin."""
    asked = json.loads(sys.stdin.read())
    sys.path[:0] = [os.getcwd(), os.path.dirname(os.path.abspath(asked["path"]))]  # after the imports above: no file takes their place
    count = (of_pytest if asked["runner"] == "pytest" else of_unittest)(asked["path"])
    os.write(asked["report"], f"{asked['token']} {count}\n".encode())


if __name__ == "__main__":
    main()
