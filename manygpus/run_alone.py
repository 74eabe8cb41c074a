"""Run a module of the kit with a Python that may not have the kit, as that of a user's script.

    python manygpus/run_alone.py manygpus.jobs.doctor.checkup ...

The folder in which the package is installed has others, too, which may not fit this Python. So only the
package itself can be imported from there.
"""

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

if __name__ == "__main__":
    # Python has put the folder of this file there, whose signals.py is not for others.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != PACKAGE]
    spec = spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    package = module_from_spec(spec)
    sys.modules[PACKAGE.name] = package
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
