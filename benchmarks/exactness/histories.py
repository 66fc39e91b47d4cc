"""What happens to a training program, as plain records. PURE."""

from __future__ import annotations

from dataclasses import dataclass

# Ids are 0 to 47: 12 batches of 4 in an epoch; batches of 12 can be shared by 1 to 4 ranks.
SAMPLES, BATCH, SHARED_BATCH = 48, 4, 12
# The second source of a mixture has ids from here on.
SECOND_SOURCE = 100
# A signal to the whole tree comes after this batch, while workers have others; so many more are
# then asked for. What comes depends on when it reaches whom, so each loader has several trials.
SIGNAL_AT, SIGNAL_MORE, SIGNAL_TRIALS = 4, 100, 3
KILL_AT = 3
# The last batch after which a life is cut, and after which one is that began from a state.
CUT_LAST, CUT_AGAIN = 12, 4


@dataclass(frozen=True, slots=True)
class Life:
    """One run of the training program, from its start to its end.

    Attributes:
        workers: Worker processes of each rank.
        ranks: Processes that train together.
        batch: Samples in a batch of all ranks.
        epochs: Epochs of the whole training, those before this life counted.
        begin: After how many batches of the life before it the state was saved that this life
            begins from; None for a life that begins from nothing.
        last: After how many of its batches it is killed; None if it ends by itself.
        fault: "worker": a worker that has made a batch is killed. "tree": SIGTERM to all
            processes.
        trial: Tells lives that are otherwise equal.
    """

    workers: int = 2
    ranks: int = 1
    batch: int = BATCH
    epochs: int = 2
    begin: int | None = None
    last: int | None = None
    fault: str = ""
    trial: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """A row of lives, or several that all have to be right.

    Attributes:
        name: What drivers say in `LACKS` if their library does not claim it.
        title: In the table.
        group: The table.
        trials: Each of them the lives of one training, one after the other.
        kind: What is read: "map", "stream" or "mixture".
        check: "once": every sample once in each epoch, in the order of an uninterrupted run if
            the world is the same. "orders": and no two epochs have one order. "bits": and random
            draws are those of the first trial, or of an uninterrupted run. "signal": how many
            batches come after the signal.
    """

    name: str
    title: str
    group: str
    trials: tuple[tuple[Life, ...], ...]
    kind: str = "map"
    check: str = "once"


FIRST = Life()
WHOLE, CUT, WORLD, OTHER = "Whole epochs", "Resumed", "Another world", "Faults, sources, randomness"


def _resumed(at: int, **changes: int) -> tuple[Life, ...]:
    return (FIRST, Life(begin=at, **changes))


def _shared(ranks: int, then: int = 0) -> tuple[Life, ...]:
    whole = Life(ranks=ranks, batch=SHARED_BATCH)
    return (whole, Life(ranks=then, batch=SHARED_BATCH, begin=2)) if then else (whole,)


HISTORIES = (
    History("epoch-0", "0 workers", WHOLE, ((Life(workers=0, epochs=1),),)),
    History("epoch-2", "2 workers", WHOLE, ((Life(epochs=1),),)),
    History("epoch-3", "3 workers", WHOLE, ((Life(workers=3, epochs=1),),)),
    History("epochs", "3 epochs", WHOLE, ((Life(epochs=3),),), check="orders"),
    History("ranks", "2 ranks", WHOLE, (_shared(2),)),
    History("first", "after batch 1", CUT, (_resumed(1),)),
    History("middle", "after each of 2 to 11", CUT, tuple(_resumed(at) for at in range(2, 12))),
    History("last", "after the last of an epoch", CUT, (_resumed(12),)),
    History("twice", "twice", CUT, ((FIRST, Life(begin=3), Life(begin=4)),)),
    History("killed", "killed 2 batches after it", CUT, ((Life(last=7), Life(begin=5)),)),
    History("workers-3", "2 to 3 workers", WORLD, (_resumed(5, workers=3),)),
    History("workers-0", "2 to 0 workers", WORLD, (_resumed(5, workers=0),)),
    History("ranks-1-2", "1 to 2 ranks", WORLD, (_shared(1, 2),)),
    History("ranks-2-3", "2 to 3 ranks", WORLD, (_shared(2, 3),)),
    History("ranks-3-1", "3 to 1 ranks", WORLD, (_shared(3, 1),)),
    History("worker", "a worker killed", OTHER, ((Life(fault="worker"),),)),
    History(
        "tree",
        "SIGTERM to all",
        OTHER,
        tuple((Life(fault="tree", epochs=10, trial=each),) for each in range(SIGNAL_TRIALS)),
        check="signal",
    ),
    History("stream", "a stream, resumed", OTHER, (_resumed(5),), kind="stream"),
    History("mixture", "a mixture, resumed", OTHER, (_resumed(5),), kind="mixture"),
    History(
        "random-workers",
        "augmentation: 0, 2, 3 workers",
        OTHER,
        tuple((Life(workers=each, epochs=1),) for each in (0, 2, 3)),
        check="bits",
    ),
    History("random-resumed", "augmentation, resumed", OTHER, (_resumed(5),), check="bits"),
)

# What each history is, for people.
MEANINGS = {
    "epoch-0": "one epoch, read by the training process itself",
    "epoch-2": "one epoch with two worker processes",
    "epoch-3": "one epoch with three worker processes",
    "epochs": "three epochs of two workers, each in another order",
    "ranks": "two ranks that train together, joined by gloo; each has its share",
    "first": "a state of after the first batch, loaded by a new process",
    "middle": "the same after each other batch of an epoch but its last: ten trainings",
    "last": "the same after the last batch of an epoch, before its loop has ended",
    "twice": "cut after 3 batches, and the resumed training again after 4 more",
    "killed": "a state of after 5 batches; SIGKILL after 7, while workers are ahead",
    "workers-3": "cut after 5 batches of two workers, resumed with three",
    "workers-0": "cut after 5 batches of two workers, resumed without workers",
    "ranks-1-2": "cut on one rank, resumed on two, with the same samples in a step",
    "ranks-2-3": "cut on two ranks, resumed on three",
    "ranks-3-1": "cut on three ranks, resumed on one",
    "worker": "SIGKILL to a worker that has made a batch, as by the kernel out of memory",
    "tree": f"SIGTERM to all processes after batch {SIGNAL_AT} of {SAMPLES // BATCH}, whose "
    f"program has a handler: how many of the next {SIGNAL_MORE} batches come, and in how many "
    f"processes the handler runs; the worst of {SIGNAL_TRIALS} runs",
    "stream": "an iterable dataset, cut after 5 batches",
    "mixture": "two datasets mixed 3 to 1, cut after 5 batches",
    "random-workers": "random draws of `random`, NumPy, torch and a generator in the dataset: the "
    "same for a sample with any number of workers",
    "random-resumed": "the same draws after a resume as without it",
}


def quick(history: History) -> History:
    """Return a history with one trial of those that differ only in where they are cut."""
    if history.check == "bits":
        return history
    return History(
        history.name, history.title, history.group, history.trials[:1], history.kind, history.check
    )
