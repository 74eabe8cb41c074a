"""The words with which the kit's own lines in the log of a job begin.

scripts/job_env.sh writes lines with `watch` and `ended` in the same form.
"""

import re
import shlex
from collections.abc import Iterable

# At the head of the log, once for each start.
JOB, NODES, GPUS, CODE, SCRIPT, PYTHON = "job", "nodes", "GPUs", "code", "script", "python"
# Below it: how long it took to put the environment on the nodes.
ENVIRONMENT = "env"
# Then: how fast its nodes are (SITE_NODE_CHECK).
CHECK = "check"
# At its end: the verdict on what the job wasted, why it failed, what failed after that, that it starts again
# in its nodes, and its exit code.
WATCH, WHY, THEN, AGAIN, ENDED = "watch", "why", "then", "again", "ended"
# The text of a line stands below that of the others.
INDENT_CHARACTERS = 8


def line(word: str, text: str) -> str:
    """Return a line of the log."""
    return f"{word:<{INDENT_CHARACTERS}}{text}"


def printable(word: str) -> str:
    """Quote a word for the shell; one that would break a line of the log, for Python."""
    return shlex.quote(word) if word.isprintable() else repr(word)


def text_of(word: str, log_line: str) -> str:
    """Return what follows the word; the line itself if it begins with another one."""
    return log_line.removeprefix(line(word, ""))


def pattern(words: Iterable[str]) -> str:
    """Return a regular expression for the beginning of lines with one of these words."""
    return "|".join(re.escape(line(word, "")) for word in words)
