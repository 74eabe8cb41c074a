"""Generate text for the GPTs with a small grammar. It needs no download, and the lowest loss is known.

Each word is a token. The tokens are on disk, in several files (shards). Every rank maps these into its memory
and reads only what it needs, so a text may be larger than the memory.
"""

import itertools
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch

from manygpus import DistEnv, Options, errors, files
from manygpus.config.options import check_sizes
from manygpus.data.loaders import Batch, Batches, DistributedBatchSampler, RankSampler, UnpaddedEvalSampler
from manygpus.devices import is_gpu
from manygpus.distributed import process_group

SHARD_TOKENS = 2**18
TOKEN_BYTES = 2  # uint16
VALIDATION_TOKENS = 2**16
NOT_OURS = "{} is no text of this program: remove it, and it is written again."


def _of_words(words: str) -> dict[str, float]:
    """Give the second word half the probability of the first, the third a third, and so on (Zipf's law)."""
    weights = {word: 1 / rank for rank, word in enumerate(words.split(), start=1)}
    return {word: weight / sum(weights.values()) for word, weight in weights.items()}


# What a symbol becomes, and with which probability. All other names are words. A verb agrees with its subject
# in number, whatever stands between them. Each text has only one reading; otherwise `entropy_rate` would be
# too high.
RULES: dict[str, dict[str, float]] = {
    "sentence": {"singular does .": 0.5, "plural do .": 0.5},
    "singular": {
        "the noun": 0.5,
        "the adjective noun": 0.3,
        "the noun that singular SEES": 0.1,
        "the noun that plural SEE": 0.1,
    },
    "plural": {
        "the nouns": 0.5,
        "the adjective nouns": 0.3,
        "the nouns that singular SEES": 0.1,
        "the nouns that plural SEE": 0.1,
    },
    "does": {"SLEEPS": 0.5, "SEES singular": 0.25, "SEES plural": 0.25},
    "do": {"SLEEP": 0.5, "SEE singular": 0.25, "SEE plural": 0.25},
    "noun": _of_words("cat dog bird horse fox cow goat hen pig duck owl bear"),
    "nouns": _of_words("cats dogs birds horses foxes cows goats hens pigs ducks owls bears"),
    "adjective": _of_words("old small quick brown lazy clever"),
    "SEES": _of_words("sees hears likes follows knows"),
    "SEE": _of_words("see hear like follow know"),
    "SLEEPS": _of_words("sleeps runs waits sings jumps"),
    "SLEEP": _of_words("sleep run wait sing jump"),
}
_TEXTS = " ".join(text for rule in RULES.values() for text in rule)
WORDS = sorted(set(_TEXTS.split()) - RULES.keys())


def entropy_rate() -> float:
    """Return the mean cost of a token, in nats, given all before it. No loss on a long text is lower."""
    symbols = list(RULES)
    # Row i: how often each symbol is in what symbol i becomes, on average.
    children = np.array([_expected_counts(rule, symbols) for rule in RULES.values()])
    words = [sum(_expected_counts(rule, WORDS)) for rule in RULES.values()]
    entropies = [_entropy(rule) for rule in RULES.values()]
    # How often a sentence uses each symbol: once if it is the first, and as a child of the others.
    is_first = [symbol == "sentence" for symbol in symbols]
    uses = np.linalg.solve(np.eye(len(symbols)) - children.T, is_first)
    return float(uses @ entropies / (uses @ words))


def _expected_counts(rule: dict[str, float], names: list[str]) -> list[float]:
    """Return how often each of the names is in what the rule makes, on average."""
    return [sum(p * text.split().count(name) for text, p in rule.items()) for name in names]


def _entropy(rule: dict[str, float]) -> float:
    """Return the cost of the choice that the rule makes, in nats."""
    return -sum(p * math.log(p) for p in rule.values())


def tokens(seed: str) -> Iterator[int]:
    """Yield independent sentences without end; a token is the index of a word in `WORDS`."""
    random = Random(seed)
    # The next symbol is the last in a list, from where it is taken.
    reversed_texts = {symbol: [text.split()[::-1] for text in rule] for symbol, rule in RULES.items()}
    bounds = {symbol: list(itertools.accumulate(rule.values())) for symbol, rule in RULES.items()}
    token_of_word = {word: token for token, word in enumerate(WORDS)}
    while True:
        to_say = ["sentence"]
        while to_say:
            name = to_say.pop()
            if name in token_of_word:
                yield token_of_word[name]
            else:
                to_say += random.choices(reversed_texts[name], cum_weights=bounds[name])[0]


def write(data_dir: Path, shards: int) -> list[Path]:
    """Write the shards that are missing; return all, the text for validation first.

    Raises:
        UserError: if a shard cannot be written, or an existing file was not written by this function.
    """
    folder = data_dir / f"grammar-{zlib.crc32(repr(RULES).encode()):08x}"  # a folder for each grammar
    validation = folder / "validation.uint16"
    paths = [validation, *(folder / f"{shard:05}.uint16" for shard in range(shards))]
    token_counts = dict.fromkeys(paths, SHARD_TOKENS)
    token_counts[validation] = VALIDATION_TOKENS
    missing = [path for path in paths if not path.exists()]
    if missing:
        files.check_writable(folder, "the text", "give a different --data-dir.")
    for path in missing:
        text = np.fromiter(tokens(path.stem), np.uint16, token_counts[path])
        fix = "free the space, or give a different --data-dir."
        with files.explained(f"{path} cannot be written", fix), files.replacing(path, "wb") as file:
            file.write(text.tobytes())
    for path in paths:
        if not path.is_file() or path.stat().st_size != TOKEN_BYTES * token_counts[path]:
            raise errors.UserError(NOT_OURS.format(path))
    return paths


class Text:
    """Windows of `context` tokens and the one that follows; neighbouring windows share one token."""

    name = "grammar"

    def __init__(self, shards: list[Path], context: int) -> None:
        self._shards = [np.memmap(path, np.uint16, mode="r") for path in shards]
        self._context = context
        self._windows_per_shard = (len(self._shards[0]) - 1) // context

    def __len__(self) -> int:
        return len(self._shards) * self._windows_per_shard

    def windows(self, indices: list[int]) -> torch.Tensor:
        """Return windows, int64 (n, context + 1).

        Raises:
            UserError: if a window has tokens that are no words, or only zeros, which is no sentence.
        """
        chosen = []
        for index in indices:
            shard, place = divmod(index, self._windows_per_shard)
            start = self._context * place
            window = self._shards[shard][start : start + self._context + 1]
            if window.max() >= len(WORDS) or not window.any():  # zeros, as a crash may leave them
                raise errors.UserError(NOT_OURS.format(window.filename))
            chosen.append(window)
        return torch.from_numpy(np.stack(chosen).astype(np.int64))


def texts(opts: Options) -> tuple[Text, Text]:
    """Return the texts to train on and to validate on. Rank 0 writes them if they are missing."""
    paths = process_group.broadcast(process_group.on_rank_0(lambda: write(opts.data_dir, opts.shards)))
    return Text(paths[1:], opts.context), Text(paths[:1], opts.context)


class TextBatches(Batches):
    """Windows without their last token, int64 (n, context), and what follows each, int64 (n * context,)."""

    def __init__(self, text: Text, order: RankSampler, device: torch.device) -> None:
        super().__init__(order, device)
        self.text = text

    def __iter__(self) -> Iterator[Batch]:
        for indices in self.order:
            windows = self.text.windows(indices)
            if is_gpu(self.device):  # a copy from pinned memory does not wait for the GPU
                windows = windows.pin_memory()
            windows = windows.to(self.device, non_blocking=True)
            yield windows[:, :-1].contiguous(), windows[:, 1:].flatten()


def training(text: Text, opts: Options, dist_env: DistEnv) -> TextBatches:
    """Return this rank's part of the batches, in a new order every epoch, as `train_loader`."""
    check_sizes(opts, len(text), dist_env.world_size)
    size = opts.batch_size if opts.dry_run else opts.train_size or len(text)
    of_ranks = opts.batch_size, opts.seed, dist_env.rank, dist_env.world_size
    return TextBatches(text, DistributedBatchSampler(min(size, len(text)), *of_ranks, size), dist_env.device)


def validating(text: Text, opts: Options, dist_env: DistEnv) -> TextBatches:
    """Return this rank's part of the windows for validation, each once, in batches as large as in training.

    Raises:
        UserError: if there are fewer windows than --test-size, or too few for each rank to get its part.
    """
    size = opts.test_size or len(text)
    if (
        not 3 * dist_env.world_size <= size <= len(text)
    ):  # with fewer, ranks may have unequal numbers of steps
        raise errors.UserError(
            f"{size} windows for validation are not within {3 * dist_env.world_size} (three for each "
            f"process) and {len(text)} (all there are): change --test-size or --context."
        )
    step_size = max(2, opts.test_batch_size or opts.batch_size // dist_env.world_size)
    return TextBatches(
        text,
        UnpaddedEvalSampler(size, step_size, dist_env.rank, dist_env.world_size),
        dist_env.device,
    )
