"""The image for the jobs: one list of steps, and site files whose containers have what a rank needs.

No container program is needed: a stand-in takes the command line apart, and tells what it was given.
"""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from checkout import copy_project
from conftest import ENVIRONMENT, REPOSITORY, ran, succeeded

CONTAINERS = REPOSITORY / "slurm" / "containers"
# In place of a container program: notes its options, and runs what stands behind them and the image's name.
STAND_IN = """#!/usr/bin/env python
import json, os, sys
from pathlib import Path

verb, *words = sys.argv[1:]
if verb not in ("exec", "run"):
    sys.exit()
options = []
while words[0].startswith("-"):
    options.append(words.pop(0))
    if options[-1] == "--bind":
        options[-1] += "=" + words.pop(0)
image = words.pop(0)
facts = {"options": options, "image": image, "no_user_site": os.environ.get("PYTHONNOUSERSITE")}
Path(os.environ["FACTS"]).write_text(json.dumps(facts))
os.execvp(words[0], words)
"""


COPIED = ("pyproject.toml", "slurm/containers/install.sh", "manygpus")


@pytest.mark.full
def test_the_steps_install_what_jobs_import(tmp_path: Path) -> None:
    """install.sh, as it is, in a folder that has only what the definitions copy.

    The packages that manygpus needs are lent by the environment of the tests in place of being downloaded.
    """
    inside = tmp_path / "inside"
    for source in COPIED:
        place = inside / Path(source).name
        place.parent.mkdir(exist_ok=True)
        if (REPOSITORY / source).is_dir():
            # Other tests write there meanwhile.
            shutil.copytree(REPOSITORY / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(REPOSITORY / source, place)
    installed, commands = tmp_path / "installed", tmp_path / "commands"
    commands.mkdir()
    python = commands / "python"
    python.write_text(
        f"""#!/bin/bash
if [[ "$*" == "-m pip install "* ]]; then
    exec {shlex.quote(sys.executable)} "$@" --quiet --no-deps --no-build-isolation --target "$INSTALLED"
fi
PYTHONPATH=$INSTALLED exec {shlex.quote(sys.executable)} "$@"
"""
    )
    python.chmod(0o755)
    environment = ENVIRONMENT | {"PATH": f"{commands}:{os.environ['PATH']}", "INSTALLED": str(installed)}
    environment.pop("PYTHONPATH", None)
    done = succeeded(ran("bash", "install.sh", cwd=inside, env=environment))
    assert re.search(r"^PyTorch \d", done.stdout, re.MULTILINE)

    def files(folder: Path) -> set[str]:
        kept = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".py", ".j2"))
        return {str(path) for path in kept}

    assert files(installed / "manygpus") == files(REPOSITORY / "manygpus")
    # The image is refused where what was installed cannot be imported.
    (installed / "manygpus" / "jobs" / "__init__.py").write_text("import nowhere\n")
    python.write_text(python.read_text().replace("    exec", "    exit # "))  # pip would put it right
    done = ran("bash", "install.sh", cwd=inside, env=environment)
    assert done.returncode != 0
    assert "No module named 'nowhere'" in done.stderr


# What a job does with a site file, but for srun.
JOB = """
set -euo pipefail
module() { :; }
source ../manygpus/jobs/scripts/site_env.sh
run_activate_environment
"${SITE_CONTAINER[@]}" python -c 'print("a rank")'
printf '%s\\n' "$MANYGPUS_DATA_DIR" "${SITE_SRUN_ARGS[@]}"
"""


@pytest.mark.parametrize("site", ["apptainer", "podman", "pyxis"])
def test_a_container_has_what_a_rank_needs(site: str, tmp_path: Path) -> None:
    """The checkout and the data at their own paths, the job's folder and variables, the right image."""
    checkout, commands, facts_file = tmp_path / "checkout", tmp_path / "commands", tmp_path / "facts.json"
    copy_project(checkout)
    shutil.copy(REPOSITORY / "slurm" / "sites" / f"{site}.sh", checkout / "slurm" / "site.sh")
    commands.mkdir()
    (commands / "python").symlink_to(sys.executable)
    for program in ("apptainer", "podman"):
        (commands / program).write_text(STAND_IN)
        (commands / program).chmod(0o755)
    stage = checkout / "03_multigpu_ddp"
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "FACTS": str(facts_file), "HOME": "/home/me"}
    done = succeeded(ran("bash", "-c", JOB, cwd=stage, env=ENVIRONMENT | environment))
    rank, data, *srun = done.stdout.splitlines()
    assert rank == "a rank"
    facts = json.loads(facts_file.read_text()) if facts_file.exists() else {}
    assert bool(facts) == (site != "pyxis")  # there it is srun that starts the container
    options = facts.get("options", srun)
    options_and_values = [option.partition("=")[::2] for option in options]
    values = dict(options_and_values)
    mounted = {path for name, mounts in options_and_values if name in MOUNTS for path in mounts.split(",")}
    for path in (str(checkout), data):
        assert any(Path(path).is_relative_to(outside) for outside in map(at_one_path, mounted)), mounted
    if site == "apptainer":
        assert "--nv" in values
        assert facts["no_user_site"] == "1"
    else:
        assert values["--workdir" if site == "podman" else "--container-workdir"] == str(stage)
    if site == "podman":
        assert {"--rm", "--env-host", "--device"} <= values.keys()
        assert (values["--network"], values["--cgroups"]) == ("host", "disabled")
        assert values["--env"].startswith("PATH=/usr/local/bin:")  # and no Python of the node's
    image = facts.get("image") or values["--container-image"]
    assert f" {image.replace('/home/me', '~')}" in (CONTAINERS / "README.md").read_text()


MOUNTS = {"--bind", "--volume", "--container-mounts"}


def at_one_path(mount: str) -> str:
    """The path of a mount that is the same inside as outside."""
    outside, _, inside = mount.partition(":")
    assert inside in ("", outside)
    return outside
