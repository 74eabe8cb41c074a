"""Import what a script imports, with the Python that is to run it, and print what is not there.

    python manygpus/jobs/doctor/script_imports.py FOLDER FILE MODULE ARGUMENTS...

The doctor runs this in the environment of the script, so it needs no packages, and 3.7 will do. The script
itself is not run. What it imports within functions, in an `if` or in a `try` is left out: it may do without.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
import traceback

# As of jobs/doctor/findings.py, which needs a newer Python.
MARK = "checkup "


def main() -> None:
    """Print one line of JSON: the version of this Python, that of PyTorch, and the problems."""
    folder, file, module, *arguments = sys.argv[1:]
    # Relative imports begin there. Python runs a package by its __main__.py.
    package = module if file.endswith("__main__.py") else module.rpartition(".")[0]
    sys.path[0] = folder
    # Modules beside the script may read its command line.
    sys.argv = [file, *arguments]
    facts: dict[str, object] = {"version": sys.version_info[:2], "python": sys.executable}
    facts["problems"] = []
    if file:
        facts["problems"] = problems_of(file, package)
    elif module:
        facts["problems"] = problems_of_module(module)
    facts["has_numpy"] = importlib.util.find_spec("numpy") is not None
    facts["torch"], facts["torch_is_for"] = torch_here()
    # The script's modules may have printed something without the end of the line.
    print("\n" + MARK + json.dumps({"rank": 0, "script": facts}), flush=True)


def torch_here() -> tuple[str, str]:
    """Return the version of PyTorch, and what it is built for; empty words if it is not there."""
    try:
        import torch
    except ImportError:
        return "", ""
    if torch.version.cuda:
        return str(torch.__version__), "CUDA " + torch.version.cuda
    if getattr(torch.version, "hip", None):
        return str(torch.__version__), "ROCm " + torch.version.hip
    return str(torch.__version__), "the CPU only"


def problems_of_module(module: str) -> list[dict[str, object]]:
    """Return the problem of an installed module, if it is not there."""
    problem = try_to(importlib.import_module, module)
    return [problem] if problem else []


def problems_of(file: str, package: str) -> list[dict[str, object]]:
    """Return what a file imports and cannot have: the line, the error, and the name of a missing module."""
    with open(file, "rb") as script:  # noqa: PTH123  as it is in the oldest of Pythons
        try:
            tree = ast.parse(script.read(), file)
        except SyntaxError as error:
            version = ".".join(map(str, sys.version_info[:2]))
            return [{"line": error.lineno, "error": f"{error.msg}, for Python {version}"}]
    problems = {}
    for node in tree.body:
        names = []
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [(module, alias.name) for alias in node.names]
        for module, name in names:
            problem = try_to(import_name, module, name, package)
            if problem:
                # One that is missing is told once.
                problems.setdefault(
                    problem.get("missing", problem["error"]), {"line": node.lineno, **problem}
                )
    return list(problems.values())


def import_name(module: str, name: str, package: str) -> None:
    """Import a module, and if there is a name also what it names there: another module, or a part of it."""
    imported = importlib.import_module(module, package)
    if name in ("", "*") or hasattr(imported, name):
        return
    try:
        importlib.import_module(f"{imported.__name__}.{name}")
    except ModuleNotFoundError:
        raise ImportError(f"{imported.__name__} has no {name}") from None


def try_to(do: object, *arguments: str) -> dict[str, object] | None:
    """Return what happens if this is done; None if it goes well."""
    try:
        do(*arguments)
    except ModuleNotFoundError as error:
        return {"error": str(error), "missing": error.name or "", **facts_of(error)}
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}"
        return {"error": message, **facts_of(error)}
    return None


def facts_of(error: BaseException) -> dict[str, str]:
    """Return in which file that the script imports this happened, and which package lacks a module."""
    facts = {}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<")
    ]
    if frames:
        facts["in_file"] = f"line {frames[-1].lineno} of {frames[-1].filename}"
    package, dot, _ = (getattr(error, "name", None) or "").partition(".")
    if dot and isinstance(error, ModuleNotFoundError) and package in sys.modules:
        version = getattr(sys.modules[package], "__version__", "")
        facts["without_it"] = f"{package} {version}".strip()
    return facts


if __name__ == "__main__":
    main()
