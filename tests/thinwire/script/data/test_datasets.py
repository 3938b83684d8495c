"""Sharing the tf.data.Dataset of a `fit` among workers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.thinwire.script.data.places import as_built, places, shared_by_all
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.data import share
from thinwire.script.data.datasets import part_of_dataset

Data = tf.data.Dataset
N = 50
BOTH = (True, False)


def first_column(batch):
    """Return the numbers of a batch's rows, for any structure."""
    leaf = tf.nest.flatten(batch)[0]
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.to_tensor()
    leaf = leaf.numpy()
    return leaf.reshape(len(leaf), -1)[:, 0].tolist()


def batches(dataset):
    return [first_column(batch) for batch in as_built(dataset)]


def numbers(dataset):
    return [row for batch in batches(dataset) for row in batch]


def parts(dataset, *args, **more):
    """Return each worker's part of a dataset, or of the result of a function called for each."""
    return [
        share({"x": dataset() if callable(dataset) else dataset, "y": None}, place).arguments["x"]
        for place in places(*args, **more)
    ]


def check_disjoint_and_complete(dataset, whole, *args, epochs=2, **more):
    mine = parts(dataset, *args, **more)
    for _ in range(epochs):
        seen = [numbers(part) for part in mine]
        assert all(seen), "a part is empty"
        assert sorted(row for rows in seen for row in rows) == sorted(whole)
    return mine


def source(total=N):
    rows = np.arange(total)
    return Data.from_tensor_slices((rows[:, None].astype("float32"), {"y": rows}))


def plain(ds):
    return ds.batch(8)


def shuffled(ds):
    return ds.shuffle(16).batch(8).prefetch(2)


def usual(ds):
    return (
        ds.map(lambda x, y: (x, y["y"]), num_parallel_calls=tf.data.AUTOTUNE)
        .cache()
        .shuffle(N, seed=3)
        .batch(8)
        .prefetch(tf.data.AUTOTUNE)
    )


def unordered(ds):
    ds = ds.shuffle(N).map(lambda x, y: x, num_parallel_calls=4, deterministic=False)
    return ds.batch(8, num_parallel_calls=2)


def with_weights(ds):
    return ds.map(lambda x, y: (x, y["y"], tf.ones([]))).shuffle(9).batch(8)


def batch_first(ds):
    return ds.batch(8).shuffle(4).map(lambda x, y: (x + 0, y["y"]))


def filtered(ds):
    return ds.filter(lambda x, y: x[0] >= 0).shuffle(N).batch(8)


def named(ds):
    return ds.map(lambda x, y: {"a": x, "b": y["y"]}).shuffle(8).batch(8)


def padded(ds):
    return ds.map(lambda x, y: tf.repeat(x, 1 + y["y"] % 3)).shuffle(8).padded_batch(8, [None])


def ragged(ds):
    return ds.map(lambda x, y: tf.repeat(x, 1 + y["y"] % 3)).shuffle(8).ragged_batch(8)


def two_shuffled(ds):
    first = ds.map(lambda x, y: x).shuffle(N, seed=5)
    second = ds.map(lambda x, y: y["y"]).shuffle(N, seed=5)
    return Data.zip((first, second)).batch(8)


def numbered(ds):
    return ds.enumerate().map(lambda number, xy: (xy[0], number)).batch(8)


def unbatched(ds):
    return ds.batch(5).map(lambda x, y: x * 1).unbatch().shuffle(N).batch(8)


def windows(ds):
    return (
        ds.map(lambda x, y: x)
        .interleave(lambda x: Data.from_tensors(x).repeat(1), cycle_length=3)
        .batch(8)
    )


def options(ds):
    chosen = tf.data.Options()
    chosen.deterministic = False
    return ds.shuffle(8).map(lambda x, y: x, num_parallel_calls=3).batch(8).with_options(chosen)


def after_batches(ds):
    return ds.batch(8).take(6)


def ignoring(ds):
    return ds.batch(8).ignore_errors().prefetch(1)


PIPELINES = (
    plain, shuffled, usual, unordered, with_weights, batch_first, filtered, named, padded, ragged,
    two_shuffled, numbered, unbatched, windows, options, ignoring,
)  # fmt: skip


#: One of elements, of batches that are cut, of batches with a filter; three workers share batches
#: of 8 unevenly.
UNEVENLY_CUT = (plain, batch_first, filtered)


@pytest.mark.parametrize(
    ("make", "one_group"),
    [(make, number % 2 == 0) for number, make in enumerate(PIPELINES)]
    + [(make, number % 2 == 1) for number, make in enumerate(PIPELINES[:3])],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parts_are_disjoint_and_complete_in_every_epoch(make, one_group):
    spec = make(source()).element_spec
    num = 3 if make in UNEVENLY_CUT else 2
    for part in check_disjoint_and_complete(lambda: make(source()), range(N), num, one_group):
        tf.nest.assert_same_structure(part.element_spec, spec)


@pytest.mark.parametrize("make", (plain, ignoring, numbered, windows), ids=lambda m: m.__name__)
def test_one_groups_batches_are_together_the_scripts(make):
    dataset = make(source())
    alone = batches(dataset)
    for num_workers in (2, 3, 5) if make is plain else (3,):
        everyone = [batches(part) for part in parts(dataset, num_workers)]
        for number, whole in enumerate(alone):
            mine = [rows[number] for rows in everyone if number < len(rows)]
            assert sorted(row for rows in mine for row in rows) == whole


@settings(max_examples=5, deadline=None)
@example(9, 2, 4, True, False)  # the last batch has fewer rows than there are workers
@example(11, 3, 4, False, False)
@example(11, 3, 4, True, True)
@given(st.integers(2, 60), st.integers(2, 3), st.integers(2, 20), st.booleans(), st.booleans())
def test_sizes_of_all_kinds(total, num_workers, batch_size, one_group, drop):
    if batch_size < num_workers or total < num_workers:
        return
    dataset = source(total).batch(batch_size, drop_remainder=drop)
    given_ = {"x": dataset, "y": None}
    everyone = shared_by_all(given_, num_workers, one_group)
    rows = [batches(shared.arguments["x"]) for shared in everyone]
    seen = sorted(row for mine in rows for batch in mine for row in batch)
    if drop:
        assert len(set(seen)) == len(seen)
    else:
        assert seen == list(range(total))
    for shared, mine in zip(everyone, rows, strict=True):
        assert shared.arguments["x"].cardinality() == len(mine)
        assert (shared.batch_size, shared.num_examples) == (batch_size, len(seen))
        if one_group and not drop:
            assert len(mine) + shared.short_by == max(map(len, rows))


def test_a_batch_that_functions_were_traced_for_is_cut_by_rows():
    def make():
        dataset = source().shuffle(N, seed=4).batch(8, drop_remainder=True)
        return dataset.map(lambda x, y: (tf.reshape(x, [8, 1]), y["y"]))

    for num_workers in (2, 3):
        mine = [batches(part) for part in parts(make, num_workers)]
        assert all(len(rows) == N // 8 for rows in mine)
        assert len({row for rows in mine for batch in rows for row in batch}) == N // 8 * 8


def test_what_counts_elements_after_a_shuffle_goes_before_the_sharing():
    whole = source().shuffle(N, seed=1, reshuffle_each_iteration=False)
    train, test = whole.skip(10), whole.take(10)
    held_back = numbers(test.batch(8))
    kept = [row for row in range(N) if row not in held_back]
    for one_group in BOTH:
        check_disjoint_and_complete(train.shuffle(9).batch(8), kept, 2, one_group)


def test_batches_that_are_counted_are_cut_by_rows_in_one_group_and_dealt_out_elsewhere():
    dataset = after_batches(source())
    mine = check_disjoint_and_complete(dataset, range(48), 2)
    assert [len(rows) for rows in batches(mine[0])] == [4] * 6
    mine = check_disjoint_and_complete(dataset, range(48), 2, False)
    assert [len(rows) for rows in batches(mine[0])] == [8] * 3


def test_repeated_datasets_share_each_pass():
    for dataset in (source().shuffle(9).repeat(3).batch(8), source().repeat(3).batch(8)):
        for one_group in BOTH:
            check_disjoint_and_complete(dataset, list(range(N)) * 3, 2, one_group)
    endless = source(48).shuffle(9).repeat().batch(8)
    given_ = {"x": endless, "steps_per_epoch": 6}
    for one_group, steps in ((True, [6, 6]), (False, [3, 3])):
        everyone = shared_by_all(given_, 2, one_group)
        assert [s.arguments["steps_per_epoch"] for s in everyone] == steps
        seen = [numbers(s.arguments["x"].take(s.arguments["steps_per_epoch"])) for s in everyone]
        assert sorted(seen[0] + seen[1]) == list(range(48))
        assert [(s.batch_size, s.num_examples) for s in everyone] == [(8, 48)] * 2


def test_files_are_shared_by_record_where_their_order_is_fixed(tmp_path):
    for file in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file}.records")) as writer:
            for row in range(file * 10, file * 10 + 10 + file):
                writer.write(str(row % 33).encode())

    def names():
        return Data.list_files(str(tmp_path / "*.records"), seed=2)

    def parse(text):
        return tf.strings.to_number(text)[None]

    def fixed():
        return names().interleave(tf.data.TFRecordDataset, cycle_length=2).map(parse)

    whole = numbers(fixed().batch(8))
    mine = check_disjoint_and_complete(lambda: fixed().shuffle(99).batch(8), whole, 2)
    assert abs(len(numbers(mine[0])) - len(numbers(mine[1]))) <= 1
    loose = Data.list_files(str(tmp_path / "*.records")).interleave(
        tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=False
    )
    check_disjoint_and_complete(loose.map(parse).shuffle(99).batch(8), whole, 4)
    direct = tf.data.TFRecordDataset([str(tmp_path / f"{file}.records") for file in range(3)])
    check_disjoint_and_complete(direct.map(parse).shuffle(9).batch(8), whole, 2)


def test_a_cache_in_a_file_is_each_workers_own(tmp_path):
    dataset = source().cache(str(tmp_path / "cached")).shuffle(9).batch(8)
    check_disjoint_and_complete(dataset, range(N), 2)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} >= {
        "cached-worker-1",
        "cached-worker-2",
    }


def test_functions_are_not_traced_anew():
    calls, factor = [], 1.0

    def scaled(x, y):
        calls.append(1)
        return x * factor

    dataset = source().shuffle(4).map(scaled).batch(8)
    factor = 100.0
    check_disjoint_and_complete(dataset, range(N), 2)
    assert len(calls) == 1


def test_functions_keep_what_they_have_captured():
    table = keras.layers.StringLookup(vocabulary=[str(row) for row in range(N)], num_oov_indices=0)
    offset = tf.Variable(0, dtype=tf.int64)

    def in_python(text):
        return tf.py_function(lambda t: table(t), [text], tf.int64)

    texts = Data.from_tensor_slices([str(row) for row in range(N)]).shuffle(9)
    for function in (lambda t: table(t) + offset, in_python):
        check_disjoint_and_complete(
            texts.map(function).map(lambda n: tf.reshape(n, [1])).batch(8), range(N), 2
        )


def test_sparse_batches_are_cut_by_rows():
    rows = tf.sparse.from_dense(
        np.diag(np.arange(1, 13)) + np.arange(1, 13)[:, None] * np.eye(12)[:1]
    )
    dataset = Data.from_tensor_slices(rows).batch(6).take(2)
    whole = numbers(dataset)
    mine = check_disjoint_and_complete(dataset, whole, 2)
    assert [part.element_spec.shape.as_list() for part in mine] == [[None, 12]] * 2


def test_how_often_a_script_has_looked_at_its_data_does_not_matter():
    dataset = source().shuffle(N, seed=2).batch(10, drop_remainder=True).map(lambda x, y: x + 0)
    first, second = places(2)
    mine = share({"x": dataset}, first).arguments["x"]
    next(iter(dataset))
    others = share({"x": dataset}, second).arguments["x"]
    for _ in range(2):
        assert sorted(numbers(mine) + numbers(others)) == list(range(N))


@pytest.mark.parametrize("one_group", BOTH)
@pytest.mark.parametrize(
    ("make", "reason"),
    (
        (lambda: Data.from_generator(lambda: range(9), tf.int32).map(lambda x: x[None]).batch(4),
         "a Python generator"),
        (lambda: source().shuffle(N).take(20).batch(4), "a shuffle has no seed"),
        (lambda: source().map(lambda x, y: x, num_parallel_calls=2, deterministic=False)
         .take(20).batch(4), "ParallelMap is not deterministic"),
        (lambda: source().filter(lambda x, y: tf.random.uniform([]) > 0).take(20).batch(4),
         "RandomUniform in it"),
        (lambda: Data.range(99).interleave(lambda n: Data.range(n)).take(9).map(lambda x: x[None])
         .batch(4), "no cycle_length"),
        (lambda: source().interleave(lambda x, y: Data.from_tensors(x).shuffle(2), cycle_length=2)
         .take(9).batch(4), "a shuffle in it"),
        (lambda: source().snapshot("/a").snapshot("/b").batch(4), "workers must not share"),
    ),
)  # fmt: skip
def test_what_cannot_be_shown_to_be_shared_is_refused(make, reason, one_group):
    tf.random.set_seed(None)  # another test's would be the shuffle's
    with pytest.raises(ConfigurationError) as error:
        parts(make(), 2, one_group)
    assert reason in str(error.value)
    assert 'shard="off"' in str(error.value) and "thinwire.worker_id()" in str(error.value)


def test_refusals_name_the_numbers():
    with pytest.raises(ConfigurationError, match=r"3 elements .* 4 workers.*--nb_workers=3"):
        parts(source(3).batch(8), 4)
    with pytest.raises(ConfigurationError, match=r"batch of 2 .* 3 workers.*--batch=worker"):
        parts(source().batch(2), 3)
    with pytest.raises(ConfigurationError, match=r"elements of the tf.data.Dataset.*batch\(n\)"):
        parts(source(), 2)
    with pytest.raises(ConfigurationError, match="--partition=iid"):
        parts(source().batch(8), 2, True, "class")


def test_without_sharing_the_script_has_its_own_part():
    dataset = source().batch(8)
    assert parts(dataset, 2, shard="off") == [dataset] * 2
    mine = parts(dataset, 2, shard="off", batch="global")
    assert [len(rows) for rows in batches(mine[0])] == [4] * 12 + [2]


def test_one_worker_keeps_the_scripts_dataset():
    dataset = source().shuffle(4).batch(8)
    assert parts(dataset, 1) == [dataset]


def test_a_part_of_a_dataset_without_batches():
    mine = [part_of_dataset(source().shuffle(9), place) for place in places(2)]
    seen = [int(y["y"]) for part in mine for _, y in part]
    assert sorted(seen) == list(range(N))


def test_keras_utilities_give_datasets_that_can_be_shared(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(5):
            image = np.full((4, 4, 3), number * 20 + (name == "b") * 100)
            keras.utils.save_img(str(tmp_path / name / f"{number}.png"), image, scale=False)
    images = keras.utils.image_dataset_from_directory(
        str(tmp_path), image_size=(4, 4), batch_size=4, verbose=False
    )
    series = keras.utils.timeseries_dataset_from_array(
        np.arange(20.0)[:, None], np.arange(20), 3, shuffle=True, batch_size=4
    )
    left, _ = keras.utils.split_dataset(np.arange(20.0)[:, None], left_size=0.5, seed=1)
    shares = (images, True), (images, False), (series, True), (left.batch(4), False)
    for dataset, one_group in shares:
        check_disjoint_and_complete(dataset, numbers(dataset), 2, one_group)


def of_three_shards(folder, **keywords):
    path = str(folder / "three")
    if not (folder / "three").exists():
        source().save(path, shard_func=lambda x, y: tf.cast(y["y"] % 3, tf.int64))
    return Data.load(path, **keywords)


def interleaved(shards):
    return shards.interleave(lambda shard: shard, cycle_length=2)


@pytest.mark.parametrize("load", [Data.load, tf.data.experimental.load], ids=["load", "old"])
def test_a_saved_dataset_is_shared(tmp_path, load):
    path = str(tmp_path / "saved")
    source().save(path)
    check_disjoint_and_complete(lambda: load(path).batch(6), range(N), 3)
    if load is not Data.load:
        return  # from there on both are the same transformation
    check_disjoint_and_complete(lambda: load(path).shuffle(N).batch(6), range(N), 2)
    batched = str(tmp_path / "batched")
    source().batch(6).save(batched)
    check_disjoint_and_complete(lambda: load(batched), range(N), 3)


def test_a_saved_dataset_of_several_shards_is_shared_if_its_order_is_fixed(tmp_path):
    make = lambda **more: of_three_shards(tmp_path, **more).batch(6)  # noqa: E731
    check_disjoint_and_complete(lambda: make(reader_func=interleaved), range(N), 2)
    with pytest.raises(ConfigurationError, match="several shards.*processors; give it a reader_fu"):
        parts(make, 2)


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (lambda shards: interleaved(shards.shuffle(3)), "a reader_func with a shuffle in it"),
        (lambda shards: interleaved(shards).shuffle(9, seed=1), "a shuffle in it"),
        (
            lambda shards: shards.interleave(
                lambda x: x, cycle_length=2, num_parallel_calls=2, deterministic=False
            ),
            "a reader_func with deterministic=False",
        ),
        (
            lambda shards: interleaved(shards).filter(lambda x, y: tf.random.uniform([]) < 0.5),
            "a reader_func with RandomUniform",
        ),
    ],
    ids=["shuffled shards", "shuffled rows", "unordered", "drawn"],
)
def test_a_reader_function_whose_order_is_open_is_refused_by_name(tmp_path, reader, words):
    with pytest.raises(ConfigurationError, match=words):
        parts(lambda: of_three_shards(tmp_path, reader_func=reader).batch(6), 2)


def test_a_saved_dataset_in_any_order_is_refused(tmp_path):
    options = tf.data.Options()
    options.deterministic = False
    dataset = of_three_shards(tmp_path, reader_func=interleaved).with_options(options).batch(6)
    with pytest.raises(ConfigurationError, match="the option deterministic=False"):
        parts(dataset, 2)


SNAPSHOTS = {
    "rows": lambda path: source().snapshot(path).batch(6),
    "batches": lambda path: source().batch(6).snapshot(path),
    "behind a shuffle": lambda path: source().shuffle(N, seed=1).snapshot(path).batch(6),
    "before a shuffle": lambda path: source().snapshot(path).shuffle(N).batch(6),
    "its own functions": lambda path: (
        source()
        .snapshot(
            path,
            reader_func=lambda shards: interleaved(shards.shuffle(5)),
            shard_func=lambda x, y: y["y"] % 4,
        )
        .batch(6)
    ),
    "full batches": lambda path: source(36).snapshot(path).batch(6, drop_remainder=True),
}


@pytest.mark.parametrize("form", SNAPSHOTS)
def test_a_snapshot_is_each_worker_s_own(tmp_path, form):
    workers = 3 if form in ("rows", "batches") else 2
    path = str(tmp_path / "snapshot")
    whole = range(36 if form == "full batches" else N)
    check_disjoint_and_complete(lambda: SNAPSHOTS[form](path), whole, workers, batch="worker")
    names = {each.name for each in tmp_path.iterdir()}
    assert f"snapshot-worker-{workers}" in names and "snapshot" not in names


def test_what_stands_before_a_snapshot_must_keep_its_order(tmp_path):
    unsure = source().filter(lambda x, y: tf.random.uniform([]) < 2.0)
    with pytest.raises(ConfigurationError, match="RandomUniform"):
        parts(unsure.snapshot(str(tmp_path / "snapshot")).batch(6), 2)
    path = str(tmp_path / "snapshot")
    with pytest.raises(
        ConfigurationError, match="snapshot keeps files that workers must not share"
    ):
        parts(source().snapshot(path).snapshot(f"{path}2").batch(6), 2)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_worker_sits_out_the_steps_that_it_lacks_in_every_pass(passes):
    """Otherwise the others would wait in the last rounds of an epoch."""
    data = source(9).batch(2).repeat(passes)
    everyone = shared_by_all({"x": data}, 2, batch="worker")
    steps = [len(list(shared.arguments["x"])) for shared in everyone]
    assert steps == [3 * passes, 2 * passes]
    assert [shared.short_by for shared in everyone] == [0, passes]


@pytest.mark.parametrize(
    ("is_filtered", "steps", "one_group", "counts"),
    [
        (True, None, True, True),
        (False, None, True, False),  # the data determine the number of steps
        (True, 3, True, False),  # the script does
        (False, 3, True, False),
        (True, None, False, False),  # the others do not wait for this worker
    ],
)
def test_rounds_without_rows_are_counted_where_only_reading_shows_them(
    is_filtered, steps, one_group, counts
):
    data = tf.data.Dataset.range(48)
    if is_filtered:
        data = data.filter(lambda number: number % 2 == 0)
    arguments = {"x": data.batch(4), "steps_per_epoch": steps}
    shared = shared_by_all(arguments, 2, one_group)[0]
    assert (shared.unfilled is not None) == counts
