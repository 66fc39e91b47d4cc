"""Rows of tokens in a loader: the same global batches for any ranks and workers, resumed, mixed."""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import random
import signal
import tarfile

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import Dataset
from worlds import World, digest

import forebay
from forebay import DataLoader, InputError, OptionError
from forebay.collate import as_list, sequences
from forebay.columns.slicing import ColumnDataset
from forebay.shards.columns import BlockColumns

SIZE, TOGETHER = 64, 24
LENGTHS = np.random.default_rng(5).integers(1, 90, 700)


class Texts(Dataset):
    """Samples whose tokens depend on every generator; the first is the sample's index."""

    def __init__(self, lengths=LENGTHS, killer=None):
        self.lengths, self.killer = lengths, killer

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        if self.killer is not None and index == 123 and not self.killer.exists():
            self.killer.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = torch.randint(1 << 30, (int(self.lengths[index]),))
        tokens[-1] = random.getrandbits(30) ^ int(np.random.randint(1 << 30))
        tokens[0] = index
        return {"tokens": tokens, "labels": tokens % 100, "document": index}


def packed(texts=None, **options):
    """Make a loader of rows."""
    rows = forebay.pack_sequences(texts or Texts(), LENGTHS, size=SIZE)
    return DataLoader(rows, **{"seed": 7, "shuffle": True, "collate_fn": as_list, **options})


def mixed(**options):
    """Make a loader of the rows of two sources."""
    sources = {
        "a": (forebay.pack_sequences(Texts(LENGTHS[:300]), LENGTHS[:300], size=SIZE), 0.7),
        "b": (forebay.pack_sequences(Texts(LENGTHS[300:]), LENGTHS[300:], size=SIZE), 0.3),
    }
    return DataLoader(
        forebay.mix(sources), **{"seed": 7, "shuffle": True, "collate_fn": as_list, **options}
    )


def plain(row):
    return tuple((each["document"], *each["tokens"].tolist()) for each in row)


def rows_of(loader, batch):
    """Return the rows of the last batch that count."""
    pairs = zip(batch, loader.mask.tolist(), strict=True)
    return [plain(row) for row, counts in pairs if counts]


def global_batches(make, world, num_workers=0, state=None, most=None):
    """Return the rows of each global batch of the next epoch, sorted, and the state after it."""
    make = functools.partial(make, num_workers=num_workers)
    with World(make, world, TOGETHER, state, rows_of) as ranks:
        found = [sorted(rows) for rows in itertools.islice(ranks.batches(), most)]
        return found, json.loads(json.dumps(ranks.state()))


@functools.cache
def expected_of(make):
    first, state = global_batches(make, 1)
    second, _ = global_batches(make, 1, state=state)
    return first, second


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("make", "world", "num_workers"),
    [
        pytest.param(make, *pair, marks=() if pair in usual else pytest.mark.thorough)
        for make, usual in ((packed, [(3, 1), (8, 0)]), (mixed, [(2, 2), (12, 0)]))
        for pair in [(1, 0), (2, 0), (3, 1), (4, 0), (6, 0), (8, 0), (12, 0), (2, 2)]
    ],
)
def test_global_batches_are_equal_bit_for_bit(make, world, num_workers):
    """For any number of ranks and workers, in every epoch, random numbers and tail included."""
    first, state = global_batches(make, world, num_workers)
    second, _ = global_batches(make, world, num_workers, state)
    assert (digest(first), digest(second)) == tuple(map(digest, expected_of(make)))
    assert first != second


@pytest.mark.slow
def test_the_length_of_a_loader_is_its_number_of_steps():
    with packed(batch_size=7) as loader:
        assert [len(list(loader)) for _ in range(2)] == [len(loader)] * 2


def test_ranks_have_nearly_equal_costs():
    loaders = [packed(batch_size=16, world_size=4, rank=rank, drop_last=True) for rank in range(4)]
    for step in zip(*loaders, strict=True):
        costs = [sum(len(each["tokens"]) ** 2 for row in batch for each in row) for batch in step]
        assert max(costs) < 1.05 * sum(costs) / 4


def test_batches_of_similar_lengths():
    """Each sample once in an epoch, other batches in the next, on each rank as many."""
    groups = forebay.batch_by_length(Texts(), LENGTHS, max_tokens=500)
    found = []
    for rank in range(3):
        loader = DataLoader(groups, batch_size=None, shuffle=True, seed=1, world_size=3, rank=rank)
        epochs = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                lengths = [len(each["tokens"]) for each in batch]
                assert len(lengths) * max(lengths) <= 500
                if loader.mask.all():
                    epochs[-1].append(frozenset(int(each["document"]) for each in batch))
        found.append(epochs)
    first, second = ([each for rank in found for each in rank[epoch]] for epoch in (0, 1))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == [*range(700)]
    assert {*first} != {*second}


def test_sequences_in_a_batch():
    """Fields of as many items as tokens are packed; others are collated over all sequences."""
    rows = [
        [{"input_ids": [5, 6, 7], "labels": [1, 2, 3], "score": 0.5}],
        [
            {"input_ids": [8], "labels": [4], "score": 1.5},
            {"input_ids": [9, 10], "labels": [5, 6], "score": 2.5},
        ],
    ]
    batch = sequences(size=4, pad=99)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 99], [8, 9, 10, 99]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, 5, 6, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 0]]
    assert batch["sequence_ids"].tolist() == [[1, 1, 1, 0], [1, 2, 2, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 5, 7, 8]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 3
    assert batch["score"].tolist() == [0.5, 1.5, 2.5]


def test_a_row_of_plain_tensors_with_features():
    rows = [[torch.ones(2, 3), torch.zeros(1, 3)], [torch.full((2, 3), 2.0)]]
    batch = sequences(size=3)(rows)
    assert batch["tokens"].shape == (2, 3, 3)
    assert batch["tokens"][1, 2].tolist() == [0.0, 0.0, 0.0]


def test_arrays_that_torch_does_not_take_as_they_are():
    """Read-only ones, of which torch warns, and reversed ones."""
    tokens = np.arange(3)
    tokens.flags.writeable = False
    batch = sequences(size=4)([[tokens], [tokens[::-1]]])
    assert batch["tokens"].tolist() == [[0, 1, 2, 0], [2, 1, 0, 0]]


def test_sequences_refuses_what_it_cannot_pack():
    with pytest.raises(InputError, match=r"sample 0 of a batch of 1 .* with a gradient: detach"):
        sequences(size=4)([[torch.ones(3, requires_grad=True)]])
    with pytest.raises(InputError, match=r"field words is .* which is not a tensor"):
        sequences(size=4)([[{"tokens": [1, 2], "words": ["a", "b"]}]])


@pytest.mark.parametrize(
    ("name", "dtype", "option"),
    [("labels", torch.uint8, "ignore=-100"), ("tokens", torch.int64, "pad=0.5")],
)
def test_what_sequences_pads_with_must_be_a_value_of_the_dtype(name, dtype, option):
    """torch would wrap or cut it, and say nothing."""
    sample = {"tokens": torch.ones(2, dtype=torch.int64)} | {name: torch.ones(2, dtype=dtype)}
    with pytest.raises(OptionError, match=rf"sequences\({option}\) is not .* in field {name}"):
        sequences(size=4, pad=0.5 if name == "tokens" else 0)([[sample]])


def test_a_mask_of_labels_is_padded_with_false():
    """As all masks are, whatever it is called."""
    sample = {"tokens": torch.ones(2), "labels_mask": torch.ones(2, dtype=torch.bool)}
    assert sequences(size=3)([[sample]])["labels_mask"].tolist() == [[True, True, False]]


@pytest.mark.slow
def test_statistics_count_tokens():
    """All of two epochs, by source; the share that is filled is that of the rows."""
    with packed(batch_size=8) as loader:
        for _ in range(2):
            list(loader)
        tokens, filled = loader.statistics().tokens["dataset"]
        assert tokens == 2 * LENGTHS.sum()
        assert filled == pytest.approx(LENGTHS.sum() / (len(loader.dataset) * SIZE))
        assert "% filled" in str(loader.statistics())
    with mixed(batch_size=8) as loader:
        list(loader)
        found = loader.statistics()
        assert set(found.tokens) == {"a", "b"}
        assert found.to_dict()["tokens/a"] > found.to_dict()["tokens/b"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name"), [("memory", "tokens"), ("arrow", "count"), ("parquet", "tokens")]
)
def test_lengths_are_a_column_of_a_table_by_column(form, name, tmp_path):
    lists = [[at] * int(length) for at, length in enumerate(LENGTHS)]
    table = pyarrow.table({"tokens": lists, "count": LENGTHS})
    path = tmp_path / ("t.arrow" if form == "arrow" else "t.parquet")
    if form == "arrow":
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    texts = forebay.from_table(table if form == "memory" else path, columns=["tokens", "count"])
    rows = forebay.pack_sequences(texts, name, size=SIZE)
    shards = forebay.open_shards(tmp_path / "t.parquet", columns=["tokens", "count"])
    groups = ColumnDataset(BlockColumns(shards.of_columns(["tokens", "count"])))
    for each in (rows, *(forebay.pack_sequences(one, name, size=SIZE) for one in (groups, shards))):
        assert each.lengths.tolist() == LENGTHS.tolist()
    with DataLoader(rows, batch_size=8, seed=0, collate_fn=sequences(size=SIZE)) as loader:
        counts = sum(torch.bincount(batch["tokens"].ravel(), minlength=700) for batch in loader)
    assert counts[1:].tolist() == LENGTHS[1:].tolist()


def test_lengths_are_a_field_of_json_lines_or_the_bytes_of_a_member(tmp_path):
    """Of lists the number of items, of integers these; `transform` has no part in it."""
    lengths = [int(each) % 50 + 1 for each in LENGTHS[:300]]
    with (tmp_path / "texts.jsonl").open("w") as file:
        for each in lengths:
            file.write(json.dumps({"tokens": [each] * each, "count": each, "word": "a"}) + "\n")
    with tarfile.open(tmp_path / "texts.tar", "w") as file:
        for number, each in enumerate(lengths):
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = each
            file.addfile(member, io.BytesIO(b"x" * each))
    lines = forebay.open_shards(tmp_path / "texts.jsonl", transform=lambda each: each["tokens"])
    for name in ("tokens", "count"):
        rows = forebay.pack_sequences(lines, name, size=SIZE)
        assert rows.lengths.tolist() == lengths
    assert sum(map(len, rows[0])) <= SIZE
    tars = forebay.open_shards(tmp_path / "texts.tar", transform=lambda each: [*each["txt"]])
    rows = forebay.pack_sequences(tars, "txt", size=SIZE)
    assert rows.lengths.tolist() == lengths
    assert sum(map(len, rows[3])) <= SIZE
    with pytest.raises(OptionError, match="'word' of sample 0 is a str, which has no number of"):
        forebay.pack_sequences(lines, "word", size=SIZE)
    with pytest.raises(
        OptionError, match="sample 0 has no field 'jpg'; its fields are: __key__, txt"
    ):
        forebay.pack_sequences(tars, "jpg", size=SIZE)


def test_a_column_without_numbers_of_tokens_is_refused():
    texts = forebay.from_table({"tokens": [[1, 2]], "word": ["a"]}, columns=["tokens", "word"])
    with pytest.raises(OptionError, match="'word' has values of type string"):
        forebay.pack_sequences(texts, "word", size=SIZE)
    with pytest.raises(OptionError, match="the columns are: tokens, word"):
        forebay.pack_sequences(texts, "words", size=SIZE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": [3, 4]}, "2 lengths for 3 samples"),
        ({"lengths": [3, 0, 4]}, "the length of sample 1 is 0"),
        ({"lengths": [3, -2, 4]}, "the length of sample 1 is -2"),
        ({"lengths": [3, 4, 50], "long": "raise"}, "sample 2 has 50 tokens, more than size=10"),
    ],
)
def test_lengths_that_cannot_be(options, words):
    lengths = options.pop("lengths")
    with pytest.raises(InputError, match=words):
        forebay.pack_sequences(["a", "b", "c"], lengths, size=10, **options)


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([1.5, 2.0], {}, "one integer for each sample"),
        ("tokens", {}, "has no columns"),
        ([1, 2], {"size": 0}, "size"),
        ([1, 2], {"long": "cut"}, "long='cut'"),
        ([1, 2], {"window": 0}, "window"),
        ([1, 2], {"cost": lambda lengths: 1}, "cost takes an array"),
    ],
)
def test_settings_that_cannot_be(lengths, options, words):
    with pytest.raises(OptionError, match=words):
        forebay.pack_sequences(["a", "b"], lengths, **{"size": 10, **options})


def test_a_sample_that_is_not_as_long_as_was_said():
    """It is named; nothing is cut in the wrong place."""
    rows = forebay.pack_sequences([torch.zeros(3), torch.zeros(4)], [3, 5], size=20)
    with pytest.raises(InputError, match="sample 1 has 4 tokens, but its length was given as 5"):
        rows[0]


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(50),
        torch.zeros(1, 50),
        np.zeros((50, 80)),
        [0] * 50,
        {"tokens": torch.zeros(50), "label": 3},
    ],
)
def test_a_padded_batch_is_never_larger_because_of_wrong_lengths(sample):
    """A sample that is longer than its length is refused and named; a shorter one is not."""
    for length, is_fine in ((50, True), (60, True), (49, False), (10, False)):
        groups = forebay.batch_by_length([sample] * 4, [length] * 4, max_tokens=120)
        if is_fine:
            assert len(groups[0]) == 2
            continue
        with pytest.raises(InputError, match=rf"sample \d has .*50 tokens, .* given as {length}"):
            groups[0]


def test_what_is_no_sequence_yet_may_have_any_length():
    """A string becomes tokens in `collate_fn`, and a number is none."""
    samples = [{"text": "of three words", "label": torch.tensor(1)}] * 2
    assert forebay.batch_by_length(samples, [3, 3], max_tokens=6)[0] == samples


def test_rows_need_a_collate_fn_and_batches_none():
    rows = forebay.pack_sequences(Texts(), LENGTHS, size=SIZE)
    with pytest.raises(OptionError, match=r"collate_fn=forebay\.collate\.sequences"):
        DataLoader(rows, batch_size=4)
    groups = forebay.batch_by_length(Texts(), LENGTHS, max_tokens=500)
    with pytest.raises(OptionError, match="batch_size=None"):
        DataLoader(groups, batch_size=4)
