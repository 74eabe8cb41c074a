"""The output of a run: one line per epoch on the screen and one row per epoch in its CSV."""

import math
import re
import secrets
import time
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

import torch
import torch.distributed as dist
from torch import nn

from trainkit.rank import identity
from trainkit.rank.epoch import Metric, Tested, Trained, why_ended
from trainkit.rank.model import class_name
from trainkit.rank.options import Options
from trainkit.rank.precision import precision_of
from trainkit.rank.state_file import save
from trainkit.runtime import place
from trainkit.runtime.device import build, device_name, git_commit, is_gpu
from trainkit.runtime.errors import tell
from trainkit.runtime.files import check_writable
from trainkit.runtime.place import Place
from trainkit.runtime.process import process_start
from trainkit.schema import samples
from trainkit.schema.columns import BASE_BATCH
from trainkit.schema.records import OF_A_RUN, RunFiles, slow_rank


class RunLog:
    """The log of one run, on rank 0 only.

    `facts` are columns of the record: the run's `stage`, and those that `facts_of_run` does not know. `unit`
    is the unit of the printed speed, and how many of it a sample has.
    Raises UserError if the results directory cannot be written to.
    """

    _begun = False  # a training, in this process: a second one does not begin with the process

    def __init__(
        self,
        options: Options,
        here: Place,
        dataset: str,
        model: nn.Module,
        facts: dict[str, object],
        unit: tuple[str, int] = ("images", 1),
    ) -> None:
        self._options, (self._unit, self._per_sample) = options, unit
        self._started = time.monotonic() if RunLog._begun else process_start()
        RunLog._begun = True
        self._before_s = 0.0  # seconds of earlier processes of this run
        self._past_first_epoch = False
        started_at = datetime.now(timezone.utc) - timedelta(seconds=time.monotonic() - self._started)
        word = re.sub(r"[^\w.-]+", "-", facts["stage"]).lstrip("-.")[:40] or "own"  # part of a file name
        self.run_id = f"{word}-{started_at:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        self._facts = facts_of_run(options, here, dataset, model)
        self._facts |= {"lr": options.scaled_lr, "optimizer": "", "schedule": ""} | facts
        self._facts |= {
            "run_id": self.run_id,
            "resumed_from": "",
            "launcher": here.launcher,
            "script": identity.of_script(),
            "batch_per_device": options.batch_size // max(facts["devices"], 1),
            "job_id": place.job_id(),
            "node_list": place.node_list(),
            "cuda_version": build().removeprefix("CUDA ") if is_gpu(here.device) else "",
            "git_commit": git_commit(),
            "started_at": f"{started_at:%Y-%m-%dT%H:%M:%SZ}",
        }
        self._recorder = None if options.dry_run else RunFiles(options.results_dir, self._facts)
        if self._recorder and options.save_model:
            check_writable(options.results_dir / "models", "the weights", "give another --results-dir.")
        tell(
            f"stage {facts['stage']} · {facts['devices']} x {self._facts['device_name']} · {dataset} · "
            f"global batch {options.batch_size} · {options.loader} loader · {self._facts['precision']} · "
            f"{self._stepped_by()}"
        )
        tell(_configuration(options, here, self._facts))

    def _stepped_by(self) -> str:
        """Name the recipe, or the optimizer that a script has made itself."""
        if not self._facts["optimizer"]:
            return f"recipe {self._facts['recipe']}"
        own = " and ".join(one.partition(" ")[0] for one in self._facts["optimizer"].split(" + "))
        return f"optimizer {own}"

    def epoch(
        self,
        epoch: int,
        trained: Trained,
        tested: Tested,
        of_ranks: list[dict[str, object]],
        metrics: Iterable[Metric] = (),
        best_epoch: int = 0,
    ) -> None:
        """Write the row of one epoch, those of its ranks and its metrics, then print its line.

        Raises:
            UserError: if the row cannot be written.
        """
        of_steps = trained.steps * self._options.batch_size
        images = of_steps if trained.samples is None else trained.samples
        images_per_s = images / (trained.seconds or math.nan)
        per_s = images_per_s * self._per_sample
        train = f"loss {trained.loss:.4f}, {per_s:,.0f} {self._unit}/s, {trained.seconds:.1f} s"
        accuracy = "" if math.isnan(tested.accuracy) else f"accuracy {tested.accuracy:.2f} %, "
        loss = "" if math.isnan(tested.loss) else f"loss {tested.loss:.4f}, "
        test = f" | test {accuracy}{loss}{tested.seconds:.1f} s" if accuracy or loss else ""
        if self._recorder:
            row = {
                "epoch": epoch,
                "warmup": not self._past_first_epoch,
                "steps": trained.steps,
                "images": images,
                "train_seconds": trained.seconds,
                "images_per_s": images_per_s,
                "test_images": tested.samples,
                "eval_seconds": tested.seconds,
                "train_loss": trained.loss,
                "test_loss": tested.loss,
                "test_accuracy": tested.accuracy,
                "best_epoch": best_epoch,
                "learning_rate": trained.learning_rate,
                "peak_memory_mb": max(row["peak_memory_mb"] for row in of_ranks),
                "elapsed_s": self._elapsed_s(),
                "recorded_at": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z",
            }
            ended = why_ended([*self._recorder.rows, row], self._options)
            if self._unit != "images":
                metrics = [Metric(f"{self._unit}_per_s", "training", per_s), *metrics]
            of_epoch = [{"epoch": epoch} | one._asdict() | {"value": float(one.value)} for one in metrics]
            self._recorder.add(of_ranks, of_epoch, **row, ended=ended)
            if not self._past_first_epoch:
                samples.note_run(self._recorder.path)
        tell(f"epoch {epoch}/{self._options.epochs}: train {train}{test}")
        if self._past_first_epoch and (slow := slow_rank(of_ranks)):
            tell(f"{slow}.")
        self._past_first_epoch = True

    @property
    def ended(self) -> str:
        """Return why the run ended before its last epoch, or "" if it did not."""
        return self._recorder.rows[-1]["ended"] if self._recorder and self._recorder.rows else ""

    def state(self) -> dict:
        """Return the log's state for a checkpoint, so that the run can continue under the same name."""
        # Optimizer and schedule go on with the constants that they were saved with.
        names = ("run_id", "resumed_from", "started_at", "precision", "optimizer", "lr", "schedule")
        facts = {name: self._facts[name] for name in names}
        return {"facts": facts, "elapsed_s": self._elapsed_s(), "rows": [*self._recorder.rows]}

    def check_same(self, rows: list[dict[str, object]], names: Iterable[str]) -> None:
        """Raise a ValueError if a run with these `rows` differs from this one in a column of `names`."""
        for name in names if rows else ():
            if str(rows[-1][name]) != str(self._facts[name]):  # NaN is NaN
                raise ValueError(f"its {name} is {rows[-1][name]}, not {self._facts[name]}")

    def go_on(self, state: dict, moved: bool = False, copied: bool = False) -> None:
        """Continue the run whose `state` was saved.

        A record that has later epochs is left alone, as is one that is not this run's, or that of a run whose
        checkpoints were `copied` and which may go on: this run then gets another name, and has the earlier
        epochs, too. If it makes later epochs of a run again that did not come to its end, `resumed_from`
        names that, unless its checkpoints were `moved`: then it was another run that made them.

        Raises:
            UserError: if the CSV cannot be written.
            ValueError: if `state` would write to another place, or no run has left it.
        """
        if not re.fullmatch(r"\w[\w.-]*", state["facts"]["run_id"]):
            raise ValueError("its run_id is not a file name")
        seconds = OF_A_RUN["elapsed_s"](str(state["elapsed_s"]))
        facts, rows = state["facts"], state["rows"]
        back = self.run_id == facts["run_id"]  # this process goes back to what it has saved
        before = facts["run_id"]
        later = self._recorder.later_rows(facts, rows)
        if later or not (back or (not copied and self._recorder.may_continue(facts, rows))):
            own = {"run_id": f"{self.run_id.rpartition('-')[0]}-{secrets.token_hex(4)}"}
            why = f"{before}.csv is damaged, of another run, or may go on without this one"
            if later:
                last = later[-1]["epoch"]
                why = f"resumed from epoch {len(rows)} of {before}, whose record has {last} and stays"
                ended = later[-1]["ended"] or last >= self._options.epochs
                own["resumed_from"] = "" if ended or moved or copied else before
            tell(f"{why}: this one is recorded as {own['run_id']}.")
            facts, rows = facts | own, [row | own for row in rows]
        self._facts |= facts
        self.run_id = self._facts["run_id"]
        if not back:
            self._before_s = seconds
        if rows:  # the limits may have changed
            rows[-1]["ended"] = why_ended(rows, self._options)
        self._recorder.go_on(facts, rows)

    def _elapsed_s(self) -> float:
        """Return the seconds that the run's processes took so far, without the time between them."""
        return self._before_s + time.monotonic() - self._started

    def finish(self, weights: dict[str, torch.Tensor]) -> None:
        """Save the weights if asked to, and say where everything is."""
        if self._recorder is None:
            tell("dry run: one training step and one test batch went through; nothing was written.")
            return
        if self._recorder.rows and not self._past_first_epoch and not self.ended:
            tell(f"all {self._options.epochs} epochs were done before: nothing left to do (more: --epochs)")
        if self.ended:
            tell(f"ended before its last epoch: {self.ended}")
        of_ranks = self._recorder.of_ranks
        peaks = [round(row["peak_memory_mb"]) for row in of_ranks if row["epoch"] == of_ranks[-1]["epoch"]]
        if len(peaks) > 1:
            tell(f"peak memory of each device, MB: {', '.join(map(str, peaks))}")
        if self._options.save_model:
            path = self._options.results_dir / "models" / f"{self.run_id}.pt"
            advice = f"mend that. The results are in {self._recorder.path}."
            save("the weights", weights, path, advice, check=False)
            tell(f"weights: {path}")
        tell(f"results: {self._recorder.path if self._recorder.rows else 'none, without an epoch'}")


def facts_of_run(options: Options, here: Place, dataset: str, model: nn.Module) -> dict[str, object]:
    """Return the columns that are the same in all rows of a training, or of a measurement of its steps."""
    return options.columns() | {
        "dataset": dataset,
        "model": class_name(model),
        "precision": precision_of(model),
        "device_name": device_name(here.device),
        "threads_per_worker": torch.get_num_threads(),
        "world_size": here.size,
        "nodes": here.nodes,
        "torch_version": str(torch.__version__),
    }


def _configuration(options: Options, here: Place, facts: dict[str, object]) -> str:
    """Describe in one line how the processes were started, and what each has to do."""
    started_by = f"{here.launcher}, {dist.get_backend()}" if dist.is_initialized() else here.launcher
    learning_rate = f"learning rate {facts['lr']:.6g}"
    if options.lr_scale != "none":
        learning_rate += f" ({options.lr_scale}: {options.lr:.6g} at batch {BASE_BATCH})"
    if options.lr_warmup_images:
        learning_rate += f" after {options.lr_warmup_images} images of warm-up"
    return (
        f"nodes {here.nodes} · ranks {here.size} ({started_by}) · "
        f"batch {facts['batch_per_device']} per device · "
        f"{learning_rate}"
    )
