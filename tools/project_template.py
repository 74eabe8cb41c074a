"""What `manygpus new` copies, made of the lesson on jobs: resumable_ddp.py and plain_slurm.sh of stage 03.

It differs in little: it makes its images up, so that it runs where nothing was downloaded, and one process
needs no launcher. `make lessons` brings manygpus/template up to date.
"""

from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = REPOSITORY / "manygpus" / "template"
LESSON = REPOSITORY / "03_multigpu_ddp"

# What stands in the lesson, and in its place in train.py.
IN_TRAIN_PY = {
    '''\
"""Train MNIST with one process per GPU, on any number of nodes, and resume: plain PyTorch, to copy for a job.

The training is that of plain_ddp.py. It saves its whole state every few hundred steps, and also when Slurm
signals that the job is about to end. When you start it again it resumes, and it ends with the losses of a
training that was never stopped.

Try: torchrun --standalone --nproc-per-node=2 resumable_ddp.py --epochs 2
     then end it with Ctrl-C, and start it again
"""
''': '''\
"""Train with one process per GPU, on any number of nodes, and resume: plain PyTorch.

Put your data in the place of `made_up_images`, and your network in that of `Net`. The training saves its
whole state every few hundred steps, and also when Slurm signals that the job is about to end. When you start
it again it resumes, and it ends with the losses of a training that was never stopped.

Try: python train.py
     torchrun --standalone --nproc-per-node=2 train.py
"""
''',
    """\
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms

DATA = Path(__file__).resolve().parents[1] / "data"  # where `make data` puts MNIST
""": """\
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

""",
    """\
class Net(nn.Module):
""": '''\
def made_up_images(number: int, seed: int) -> TensorDataset:
    """Return images and their labels: a pattern for each of 10 labels, and noise; the same on all ranks."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    random_numbers = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (number,), generator=random_numbers)
    noise = torch.randn(number, 1, 28, 28, generator=random_numbers)
    return TensorDataset(patterns[labels] + noise, labels)


class Net(nn.Module):
''',
    """\
    parser.add_argument("--data-dir", default=DATA, help="the folder that holds MNIST/raw/")
""": "",
    """\
    # Take the GPU of this process (GPU 0 if it sees only one), then meet the others.
""": """\
    # Without a launcher this process is alone. Those of srun are not, and job.sh tells them their ranks.
    if "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="localhost", MASTER_PORT="0")
    # Take the GPU of this process (GPU 0 if it sees only one), then meet the others.
""",
    """\
    if not Path(args.data_dir, "MNIST").is_dir():
        raise SystemExit(f"there is no MNIST in {args.data_dir}: `make data` in the top folder fetches it")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    train_set = datasets.MNIST(args.data_dir, train=True, transform=transform)
    test_set = datasets.MNIST(args.data_dir, train=False, transform=transform)
""": """\
    train_set = made_up_images(4000, seed=1)
    test_set = made_up_images(1000, seed=2)
""",
    "resumable_ddp.pt": "train.pt",
}
# The same of job.sh. `manygpus new` has it ask for what the site wants.
IN_JOB_SH = {
    "resumable_ddp.py on two nodes with four GPUs each": "train.py on two GPUs",
    "# For a script of your own, replace resumable_ddp.py with its name. Put the commands that prepare your "
    "Python (module\n# load, conda activate) before srun": "# Put the commands that prepare your Python "
    "(module load, conda activate) before\n# srun",
    "one to train, three to load images": "one to train, the others to load images",
    "# The ranks meet on": """\
# Some sites count the cores by the GPU, and srun takes one of the two.
SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_GPU:-1}}
unset SLURM_CPUS_PER_GPU
# The ranks meet on""",
    "plain_slurm.sh": "job.sh",
    "resumable_ddp.py": "train.py",
}


def of_lesson(name: str, changes: Mapping[str, str]) -> str:
    """Return a file of the lesson, changed.

    Raises:
        ValueError: if the lesson does not have what is to be changed.
    """
    text = (LESSON / name).read_text()
    for of_lesson, of_template in changes.items():
        if of_lesson not in text:
            raise ValueError(f"{name} has changed, and tools/project_template.py has to: {of_lesson}")
        text = text.replace(of_lesson, of_template)
    return text


def up_to_date() -> dict[str, str]:
    """Return the files of the template, by their names, as they follow from the lesson of today."""
    return {
        "train.py": of_lesson("resumable_ddp.py", IN_TRAIN_PY),
        "job.sh": of_lesson("plain_slurm.sh", IN_JOB_SH),
    }


def write() -> None:
    """Bring the template up to date."""
    for name, text in up_to_date().items():
        (TEMPLATE / name).write_text(text)
