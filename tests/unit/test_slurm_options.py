"""What a job asks sbatch for, in the words of its site."""

from pathlib import Path

import pytest

from manygpus.errors import UserError
from manygpus.jobs.site import OPTION_TEMPLATES, Site
from manygpus.jobs.stages import STAGES, resources
from manygpus.jobs.submit.slurm_options import sbatch_options

ONE = resources(STAGES["single"], 1)
ALL_OF_A_NODE = resources(STAGES["dp"], 2)
TWO_NODES = resources(STAGES["ddp"], 4, nodes=2)
ON_CPU = resources(STAGES["ddp"], 0, nodes=2)
BY_GPU = {"SITE_GPUS": "--gpus=%d", "SITE_CPUS": "--cpus-per-gpu=%d", "SITE_MEM": "--mem-per-gpu=%dG"}


def site(sbatch: dict[str, str] | None = None, **words: str) -> Site:
    here = Path("/here")
    return Site(sbatch or {}, here, here, here, option_templates=OPTION_TEMPLATES | words, monitor=True)


def test_the_usual_words_are_those_of_the_job_scripts() -> None:
    for shape, script in (
        (ONE, "01_singlegpu/slurm_submit.sh"),
        (resources(STAGES["ddp"], 2), "03_multigpu_ddp/slurm_submit.sh"),
    ):
        text = (STAGES["ddp"].script.parents[1] / script).read_text()
        for name, value in sbatch_options(site(), shape).items():
            assert f"\n#SBATCH --{name}={value} " in text, script


@pytest.mark.parametrize(
    ("shape", "words", "asked"),
    [
        (TWO_NODES, {}, "--gpus-per-node=2 --cpus-per-task=2 --mem=16G"),
        (ON_CPU, {}, "--cpus-per-task=2 --mem=8G"),
        # A kind of GPU, and no memory at all.
        (ONE, {"SITE_GPUS": "--gres=gpu:a100:%d", "SITE_MEM": ""}, "--gres=gpu:a100:1 --cpus-per-task=2"),
        (TWO_NODES, {"SITE_GPUS": "--gpus-per-node=a100:%d", "SITE_CPUS": ""},
         "--gpus-per-node=a100:2 --mem=16G"),
        # The GPUs of the whole job, and what each brings along.
        (TWO_NODES, BY_GPU, "--gpus=4 --cpus-per-gpu=2 --mem-per-gpu=8G"),
        (ALL_OF_A_NODE, BY_GPU, "--gpus=2 --cpus-per-gpu=2 --mem-per-gpu=8G"),
        (ON_CPU, BY_GPU, "--cpus-per-task=2 --mem=8G"),
        (TWO_NODES, {"SITE_GPUS": "--gpus-per-task=%d --gres-flags=enforce-binding",
                     "SITE_MEM": "--mem-per-cpu=%dG"},
         "--gpus-per-task=1 --gres-flags=enforce-binding --cpus-per-task=2 --mem-per-cpu=4G"),
        # 16 GB over 6 cores: with 2 GB for each of them it would have 12.
        (resources(STAGES["ddp"], 2, cpus_per_gpu=3), {"SITE_MEM": "--mem-per-cpu=%dG"},
         "--gpus-per-node=2 --cpus-per-task=3 --mem-per-cpu=3G"),
        (ALL_OF_A_NODE, {"SITE_GPUS": "--gpus-per-task=%d", "SITE_MEM": "--mem-per-cpu=3900M"},
         "--gpus-per-task=2 --cpus-per-task=4 --mem-per-cpu=3900M"),
        # GPUs that Slurm does not know come with the node.
        (TWO_NODES, {"SITE_GPUS": ""}, "--cpus-per-task=2 --mem=16G"),
    ],
)  # fmt: skip
def test_the_words_of_a_site(shape: object, words: dict[str, str], asked: str) -> None:
    options = " ".join(f"--{name}={value}" for name, value in sbatch_options(site(**words), shape).items())
    assert options == asked


@pytest.mark.parametrize("variable", ["SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_NODE"])
def test_memory_by_a_variable_of_sbatch_is_not_overruled(variable: str) -> None:
    """Nor asked for in a second form, which sbatch refuses."""
    by_gpu = {"SITE_MEM": "--mem-per-gpu=%dG"}
    assert not {"mem", "mem-per-gpu"} & sbatch_options(site({variable: "4G"}, **by_gpu), ONE).keys()
    for other in ({variable: ""}, {"SBATCH_MEM_BIND": "local"}):
        assert "mem-per-gpu" in sbatch_options(site(other, **by_gpu), ONE)


@pytest.mark.parametrize(
    ("setting", "words", "problem"),
    [
        ("SITE_GPUS", "gpu:a100:%d", "as in --gpus-per-node=%d"),
        ("SITE_GPUS", "--gres gpu:%d", "'--gres': write"),
        ("SITE_GPUS", "--gres=gpu:a100:2", "every job would hold the same number"),
        ("SITE_CPUS", "--cpus=%d", "may be in --cpus-per-task, --cpus-per-gpu"),
        ("SITE_MEM", "--mem-per-cpu=%dM", "write GB"),
    ],
)
def test_words_that_are_no_options(setting: str, words: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"{setting} of slurm/site.sh has .*{problem}"):
        sbatch_options(site(**{setting: words}), TWO_NODES)


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("10", 10), ("9:30", 10), ("1:10:00", 70), ("2-0", 2880), ("1-2:3", 1563), ("1-2:3:4", 1564),
     ("UNLIMITED", None)],
)  # fmt: skip
def test_the_limit_of_a_site(limit: str, minutes: int | None) -> None:
    assert site({"SBATCH_TIMELIMIT": limit}).minutes == minutes
    assert site().minutes is None
