"""Which tests stay together on one worker of pytest-xdist, and which are handed out one by one.

`--dist=loadgroup` with the mark `xdist_group` is made for this, but does nothing with pytest 9.2
(https://github.com/pytest-dev/pytest-xdist/issues/1386). The process that hands out knows the tests by their
names only, so what a test takes is read from its file.
"""

import ast
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
CLUSTERS = 2  # that run at the same time, each with the tests of some files
OF_A_CLUSTER = {"cluster", "on_cluster"}  # fixtures in conftest.py


class GroupedTests(LoadScopeScheduling):
    """Hands out test by test, but together those that share what takes long to make.

    That is a practice cluster, or what a file makes once for its tests. A cluster belongs to one test at a
    time, as a test may cancel all jobs there, or cut off a node.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of a test's group; its own name, if it is in none."""
        file, _, test = nodeid.partition("::")
        path = self.config.rootpath / file
        name = test.partition("[")[0]
        if name in _tests_of_a_cluster(path):
            if self.config.getoption("markexpr") == "cluster":
                # No other tests fill the time, so each worker has a cluster, for one file after the other.
                return file
            files = _files_of_a_cluster()
            return f"cluster {files.index(path) * CLUSTERS // len(files)}"
        if 'scope="module"' in path.read_text():
            return file
        return nodeid


@cache
def _tests_of_a_cluster(path: Path) -> set[str]:
    """Return the functions of a file that take a fixture of the cluster, or one of the file that takes it."""
    arguments = {
        node.name: {argument.arg for argument in node.args.args}
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    fixtures = OF_A_CLUSTER | {name for name, taken in arguments.items() if taken & OF_A_CLUSTER}
    return {name for name, taken in arguments.items() if taken & fixtures}


@cache
def _files_of_a_cluster() -> list[Path]:
    return [path for path in sorted(TESTS.glob("*/test_*.py")) if _tests_of_a_cluster(path)]
