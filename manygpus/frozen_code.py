"""The frozen code of a job: what its git checkout had when the job was submitted.

It lies in the folder that submit.py or sweep.py made for the job or the sweep:

| name | meaning |
|---|---|
| `code` | the copy, which the job runs; jobs/submit/freezing.py makes it |
| `code.files` | the names of the files in it, each with a NUL after it |
| `code.json` | where it comes from (`FrozenCode`), written last: without it the copy is not complete |

It needs only the standard library.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER, FILES, FACTS = "code", "code.files", "code.json"
# In the environment of a script that does not use the kit: the counterpart of the folder that it starts in.
VARIABLE = "MANYGPUS_CODE_DIR"


@dataclass(frozen=True)
class FrozenCode:
    """A copy of a checkout.

    Attributes:
        folder: the copy.
        checkout: the top folder of what was copied.
        sent_from: the counterpart in the copy of the folder that the job was sent from; `folder` if that was
            outside of the checkout.
        commit: the commit that was checked out, with "-dirty" if tracked files had changed; "" if there was
            none so far.
        changed_files: how many files differed from that commit, or were new.
        made_at: when it was made.
    """

    folder: Path
    checkout: Path
    sent_from: Path
    commit: str
    changed_files: int
    made_at: str

    @classmethod
    def read(cls, job_folder: Path) -> "FrozenCode | None":
        """Return the frozen code in the folder of a job or a sweep; None if there is none."""
        try:
            facts = json.loads((job_folder / FACTS).read_text(encoding="utf-8"))
            folder = job_folder / FOLDER
            return cls(
                **facts
                | {
                    "folder": folder,
                    "checkout": Path(facts["checkout"]),
                    "sent_from": folder / facts["sent_from"],
                }
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def as_json(self) -> str:
        """Return the content of `code.json`, which stays right if the folder of the sweep is moved."""
        facts = asdict(self)
        del facts["folder"]
        facts["checkout"] = str(self.checkout)
        facts["sent_from"] = str(self.sent_from.relative_to(self.folder))
        return json.dumps(facts, indent=1)

    def files(self) -> list[str]:
        """Return the names of the files that were copied, from the top of the checkout.

        Raises:
            OSError: if their list cannot be read.
        """
        names = self.folder.with_name(FILES).read_bytes().split(b"\0")
        return [os.fsdecode(name) for name in names if name]

    @property
    def commit_in_words(self) -> str:
        """Return the commit, and how many files were different from it."""
        commit = self.commit.removesuffix("-dirty") or "no commit"
        if not self.changed_files:
            return commit
        return f"{commit} with {self.changed_files} changed file{'s' * (self.changed_files > 1)}"

    def original(self, path: Path) -> Path:
        """Return the path in the checkout of a path in the copy; other paths as they are."""
        return self.checkout / path.relative_to(self.folder) if path.is_relative_to(self.folder) else path

    def as_typed(self, word: str) -> str:
        """Return an argument of the job with the name that its user typed in place of one in the copy."""
        word = word.replace(f"{self.sent_from}{os.sep}", "")
        return word.replace(f"{self.folder}{os.sep}", f"{self.checkout}{os.sep}")


def is_copy(folder: Path) -> bool:
    """Return whether this folder is a copy, whose files are none of the job's or the sweep's."""
    return folder.name == FOLDER and (folder.parent / FACTS).exists()


def running() -> FrozenCode | None:
    """Return the frozen code that the running script is in; None if it is in none, and in a notebook."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return of(Path(script).absolute()) if script else None


def of(path: Path) -> FrozenCode | None:
    """Return the frozen code that a script or a folder lies in; None if it lies in none."""
    for folder in (path, *path.parents):
        if folder.name == FOLDER:
            code = FrozenCode.read(folder.parent)
            if code:
                return code
    return None
