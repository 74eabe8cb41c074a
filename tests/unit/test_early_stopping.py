"""EarlyStopping in a loop of one's own."""

from manygpus.training.early_stopping import EarlyStopping

LOSSES = [3.0, 2.0, 2.5, 2.2, 1.0]


def test_it_ends_when_no_epoch_was_better_for_a_while() -> None:
    early_stopping = EarlyStopping(epochs=5, patience=2)
    for epoch, loss in enumerate(LOSSES, start=1):
        early_stopping.note(epoch, loss)
        if early_stopping.reason:
            break
    assert (epoch, early_stopping.reason) == (4, "no better for 2 epochs")


def test_it_ends_at_an_accuracy_and_not_after_the_last_epoch() -> None:
    early_stopping = EarlyStopping(epochs=2, accuracy=90)
    early_stopping.note(1, 1.0, accuracy=89.9)
    assert not early_stopping.reason
    early_stopping.note(1, 1.0, accuracy=90.0)
    assert early_stopping.reason == "accuracy 90 reached"
    early_stopping.note(2, 1.0, accuracy=95.0)
    assert not early_stopping.reason


def test_it_resumes_where_it_was() -> None:
    before, after = (EarlyStopping(epochs=5, patience=2) for _ in range(2))
    for epoch in (1, 2, 3):
        before.note(epoch, LOSSES[epoch - 1])
    after.load_state_dict(before.state_dict())
    after.note(4, LOSSES[3])
    assert after.reason == "no better for 2 epochs"
