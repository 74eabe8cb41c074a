"""The pictures of the pages, drawn from committed measurements. `make lessons` writes them anew."""

from collections.abc import Callable
from pathlib import Path

from pictures import plots, recording, schemes
from pictures.svg import Picture

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES: dict[str, Callable[[], Picture]] = {
    "results/pictures/front.svg": plots.front,
    "results/pictures/compare.svg": recording.session,
    "results/pictures/choice.svg": plots.choice,
    "01_singlegpu/pictures/batch.svg": plots.batch,
    "01_singlegpu/pictures/ladder.svg": plots.one_gpu_ladder,
    "01_singlegpu/pictures/timelines.svg": plots.timelines,
    "01_singlegpu/pictures/request.svg": schemes.request,
    "02_multigpu_dp/pictures/dp_and_ddp.svg": schemes.dp_and_ddp,
    "03_multigpu_ddp/pictures/scaling.svg": plots.scaling,
    "03_multigpu_ddp/pictures/learning_rate.svg": plots.learning_rate,
    "03_multigpu_ddp/pictures/step.svg": plots.step,
    "03_multigpu_ddp/pictures/gpt_ladder.svg": plots.gpt_ladder,
    "03_multigpu_ddp/pictures/processes.svg": schemes.processes,
    "03_multigpu_ddp/pictures/hang.svg": schemes.hang,
    "03_multigpu_ddp/pictures/what_fits.svg": schemes.what_fits,
    "slurm/pictures/cluster.svg": schemes.cluster,
    "slurm/pictures/stop.svg": schemes.stop,
    "slurm/pictures/sample.svg": schemes.sample,
    "slurm/pictures/looks_busy.svg": plots.looks_busy,
    "slurm/pictures/minute.svg": plots.minute,
}


def write() -> None:
    """Draw all pictures into their files."""
    for name, draw in PICTURES.items():
        path = REPOSITORY / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(draw()))
