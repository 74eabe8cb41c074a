"""When a training ends before its last epoch: at an accuracy, or when its loss no longer falls."""

import math


class EarlyStopping:
    """The rules of --stop-at and --patience, with what they need to know of the epochs so far.

        early_stopping = EarlyStopping(epochs=14, patience=2)
        for epoch in range(1, 15):
            ...  # train and evaluate
            early_stopping.note(epoch, test_loss)
            if early_stopping.reason:
                break

    Every rank may have one, but one rank has to decide for all: the losses of two may differ in a digit.

    Args:
        epochs: the number planned. After the last one there is nothing to stop.
        accuracy: percent. The training ends when its test reaches it.
        patience: epochs. The training ends when so many in a row have not been better than the best one.
    """

    def __init__(self, epochs: int, accuracy: float | None = None, patience: int | None = None) -> None:
        self._epochs = epochs
        self._accuracy_to_reach = accuracy
        self._patience = patience
        self._epoch = 0
        self._best_epoch = 0
        self._accuracy = math.nan
        self._best_loss = math.inf

    def note(self, epoch: int, loss: float, accuracy: float = math.nan, best_epoch: int = 0) -> None:
        """Note the test of an epoch; without a `best_epoch`, that with the lowest loss is the best."""
        self._epoch = epoch
        self._accuracy = accuracy
        if best_epoch:
            self._best_epoch = best_epoch
        elif loss < self._best_loss:
            self._best_epoch = epoch
            self._best_loss = loss

    @property
    def reason(self) -> str:
        """Return why the training ends before its last epoch, or "" if it does not."""
        if self._epoch >= self._epochs:
            return ""
        if self._accuracy_to_reach and self._accuracy >= self._accuracy_to_reach:
            return f"accuracy {self._accuracy_to_reach} reached"
        since_best = self._epoch - self._best_epoch
        if self._patience and since_best >= self._patience:
            return f"no better for {since_best} epoch{'s' if since_best > 1 else ''}"
        return ""

    def state_dict(self) -> dict[str, float]:
        return {
            "epoch": self._epoch,
            "accuracy": self._accuracy,
            "best_epoch": self._best_epoch,
            "best_loss": self._best_loss,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._epoch = state["epoch"]
        self._accuracy = state["accuracy"]
        self._best_epoch = state["best_epoch"]
        self._best_loss = state["best_loss"]
