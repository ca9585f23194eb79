"""The generators: exact, repeatable, rewindable, at their pace."""

import pickle
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stillframe.api.sources import EndOfData, NothingYet, SourceContext, Split
from stillframe.connectors.generate import (
    CLICK_SCHEMA,
    RATE_SCHEMA,
    ClickSource,
    RateSource,
    clicks_from_options,
    clicks_table,
    rate_from_options,
)
from stillframe.errors import BuildError, UnknownOption
from stillframe.ids import SubtaskIndex


class SetClock:
    """A clock that shows what it was set to."""

    def __init__(self):
        self.seconds = 1000.0

    def monotonic_seconds(self):
        return self.seconds

    def wall_ms(self):
        return int(self.seconds * 1000)


def open_reader(source, splits, clock=None):
    return source.open(splits, SourceContext(SubtaskIndex(0), 1, clock or SetClock()))


def read_all(source, splits, clock=None):
    """Every row, moving the clock on whenever the reader asks for patience."""
    clock = clock or SetClock()
    reader = open_reader(source, splits, clock)
    batches = []
    for _ in range(100_000):
        match reader.poll():
            case EndOfData():
                return pa.Table.from_batches(batches, source.schema)
            case NothingYet(retry_seconds):
                assert retry_seconds > 0
                clock.seconds += retry_seconds
            case batch:
                batches.append(batch)
    raise AssertionError("the source does not end")


def truth(source):
    rows = source.records // source.partitions + 1
    whole = pa.Table.from_batches(
        [clicks_table(source, p, 0, rows) for p in range(source.partitions)]
    )
    return whole.filter(pc.field("id") < source.records).sort_by("id")


@pytest.mark.parametrize("records", [0, 1, 3, 4, 5, 1000, 10_007])
def test_a_bounded_source_makes_every_id_once(records):
    source = ClickSource(records=records, batch_rows=100)

    table = read_all(source, source.splits(2))

    assert sorted(table["id"].to_pylist()) == list(range(records))
    assert table.schema == CLICK_SCHEMA


def test_the_clicks_can_be_recounted_without_positions():
    source = ClickSource(records=5003, partitions=3, seed=7, batch_rows=64)
    assert read_all(source, source.splits(1)).sort_by("id").equals(truth(source))


def test_a_click_depends_on_nothing_but_the_seed_and_its_place():
    source = ClickSource(seed=3)
    whole = clicks_table(source, 1, 0, 1000)

    assert clicks_table(source, 1, 137, 612).equals(whole.slice(137, 475))
    assert not clicks_table(ClickSource(seed=4), 1, 0, 1000)["app_id"].equals(whole["app_id"])


@pytest.mark.parametrize("columns", [("app_id",), ("user_id", "at"), ("id",)])
def test_a_click_is_the_same_whichever_of_its_columns_are_wanted(columns):
    source = ClickSource(records=1_000, partitions=1)
    context = SourceContext(SubtaskIndex(0), 1, SetClock(), columns=columns)

    made = source.open(source.splits(1), context).poll()

    assert made.equals(clicks_table(source, 0, 0, 1_000).select(list(columns)))


def test_the_first_clicks_stay_what_they_were():
    """Golden: changing the formula would make old checkpoints of generated jobs a lie."""
    rows = clicks_table(ClickSource(), 1, 0, 2).to_pydict()
    assert rows["id"] == [1, 5]
    assert rows["app_id"] == ["app-0005", "app-0001"]
    assert rows["user_id"] == [684446, 66381]
    assert [at.isoformat() for at in rows["at"]] == [
        "2026-01-01T00:00:00.001374+00:00",
        "2026-01-01T00:00:00.005069+00:00",
    ]


def test_apps_may_also_be_alike():
    even = clicks_table(ClickSource(apps=100, skew=1), 2, 0, 100_000)["app_id"]

    counts = even.value_counts().field("counts").to_numpy()
    assert len(counts) == 100
    assert counts.min() > 800
    assert counts.max() < 1200
    assert clicks_from_options({"skew": "1"}) == ClickSource(skew=1)
    with pytest.raises(BuildError, match="option skew of clicks must be at least 1, not 0"):
        ClickSource(skew=0)


def test_some_apps_are_far_more_popular_and_time_only_rises():
    batch = clicks_table(ClickSource(apps=100), 2, 0, 100_000)

    counts = sorted(pc.value_counts(batch["app_id"]).field("counts").to_pylist())
    assert len(counts) == 100
    assert counts[-1] > 10 * counts[0]
    at = batch["at"].view(pa.int64()).to_numpy()
    assert (at[1:] > at[:-1]).all()


def test_splits_take_turns():
    source = ClickSource(partitions=3, batch_rows=10)
    reader = open_reader(source, source.splits(1))

    assert [reader.poll()["id"][0].as_py() for _ in range(5)] == [0, 1, 2, 30, 31]


@pytest.mark.parametrize("seed", range(30))
def test_wherever_it_stops_what_was_read_before_and_after_is_everything_once(seed):
    random = Random(seed)
    source = ClickSource(
        records=random.randint(0, 3000),
        partitions=random.randint(1, 5),
        records_per_second=random.choice([None, 50_000.0]),
        batch_rows=random.randint(1, 300),
        seed=seed,
    )
    splits, batches = source.splits(1), []
    for _ in range(random.randint(1, 4)):
        clock = SetClock()
        reader = open_reader(pickle.loads(pickle.dumps(source)), splits, clock)
        for _ in range(random.randint(0, 20)):
            polled = reader.poll()
            if isinstance(polled, pa.RecordBatch):
                batches.append(polled)
            clock.seconds += 0.003
        splits = reader.splits()
    rest = read_all(source, splits)

    table = pa.concat_tables([pa.Table.from_batches(batches, CLICK_SCHEMA), rest])
    assert table.sort_by("id").equals(truth(source))


def test_a_rate_is_kept():
    clock = SetClock()
    source = ClickSource(records_per_second=10_000, partitions=2)
    reader = open_reader(source, source.splits(1), clock)
    rows = 0

    assert reader.poll() == NothingYet(pytest.approx(0.005))
    while clock.seconds < 1003:
        match reader.poll():
            case NothingYet(retry_seconds):
                clock.seconds += retry_seconds
            case batch:
                rows += batch.num_rows

    assert rows == pytest.approx(30_000, rel=0.01)


def test_a_slow_rate_waits_for_its_next_row_and_not_for_ever():
    clock = SetClock()
    source = ClickSource(records_per_second=0.5, partitions=1, records=3)

    assert read_all(source, source.splits(1), clock).num_rows == 3
    assert clock.seconds == pytest.approx(1006, abs=0.1)


def test_a_restored_reader_goes_on_at_its_pace_without_a_burst_or_a_stall():
    source = ClickSource(records_per_second=1000, partitions=1)
    clock = SetClock()
    clock.seconds += 3600
    reader = open_reader(source, [Split("partition-00000", {"next": 500_000})], clock)

    assert isinstance(reader.poll(), NothingYet)
    clock.seconds += 0.1
    batch = reader.poll()
    assert batch.num_rows == pytest.approx(100, abs=1)
    assert batch["id"][0].as_py() == 500_000


def test_a_reader_without_splits_ends_at_once():
    assert open_reader(ClickSource(), []).poll() == EndOfData()


def test_rate_counts_values_densely_at_spark_s_pace():
    clock = SetClock()
    source = RateSource(rows_per_second=5, partitions=2, rows=11, start=100, clock=clock)

    table = read_all(source, source.splits(1), clock).sort_by("value")

    assert table.schema == RATE_SCHEMA
    assert table["value"].to_pylist() == list(range(100, 111))
    times_us = table["timestamp"].cast(pa.int64()).to_pylist()
    assert times_us == [1_000_000_000 + 200_000 * i for i in range(11)]
    assert clock.seconds == pytest.approx(1002.4, abs=0.05)


def test_a_replayed_rate_gives_the_same_times_whatever_the_clock_says():
    clock = SetClock()
    source = RateSource(rows_per_second=1000, rows=50, clock=clock)
    splits = source.splits(1)
    first = read_all(source, splits, clock)
    clock.seconds += 500

    assert read_all(source, splits, clock).equals(first)


def test_a_rate_that_catches_up_gives_each_row_at_the_time_it_carries():
    clock = SetClock()
    source = RateSource(rows_per_second=1000, rows=10_000, catch_up=True, clock=clock)
    splits = source.splits(1)
    clock.seconds += 2  # the job needs that long to start
    reader = open_reader(source, splits, clock)

    overdue = reader.poll()
    assert overdue.num_rows == 2000, "what was due before comes at once"
    assert isinstance(reader.poll(), NothingYet)
    clock.seconds += 0.006
    times_us = reader.poll()["timestamp"].cast(pa.int64()).to_pylist()
    now_us = clock.seconds * 1_000_000
    assert all(now_us - 10_000 <= time_us <= now_us for time_us in times_us)


def test_a_rate_that_catches_up_makes_good_for_the_time_it_was_down():
    clock = SetClock()
    source = RateSource(rows_per_second=1000, partitions=2, catch_up=True, clock=clock)
    [first, _] = source.splits(2)
    clock.seconds += 1
    reader = open_reader(source, [first], clock)
    assert reader.poll().num_rows == 500
    [split] = reader.splits()
    clock.seconds += 3

    assert open_reader(source, [split], clock).poll().num_rows == 1500


def test_a_rate_climbs_for_as_long_as_spark_s_does_also_after_a_restart():
    clock = SetClock()
    source = RateSource(rows_per_second=10, partitions=2, ramp_up_seconds=4, clock=clock)
    splits = source.splits(1)
    reader = open_reader(source, splits, clock)
    rows = []

    def read_until(seconds):
        while clock.seconds < 1000 + seconds:
            clock.seconds += 0.05
            while not isinstance(polled := reader.poll(), NothingYet):
                rows.extend(polled.to_pylist())

    read_until(3.02)
    reader = open_reader(source, reader.splits(), clock)  # it goes on from where it was
    read_until(6.1)

    seconds = [(row["timestamp"].timestamp() - 1000) // 1 for row in rows]
    # 2, 4, 6, 8 and from then on 10: the numbers that Spark's own source has in its comment.
    assert [seconds.count(second) for second in range(5)] == [2, 4, 6, 8, 10]
    assert sorted(row["value"] for row in rows) == list(range(len(rows)))
    by_value = sorted(rows, key=lambda row: row["value"])
    assert [row["timestamp"] for row in by_value] == sorted(row["timestamp"] for row in rows)


def test_options_are_spelled_as_spark_spells_them():
    assert rate_from_options({"rampUpTime": "5s"}) == RateSource(ramp_up_seconds=5)
    assert rate_from_options({"rowspersecond": "7", "numPartitions": "2"}) == RateSource(7, 2)
    assert rate_from_options({"catchUp": "true"}) == RateSource(catch_up=True)
    assert clicks_from_options({"records": "10", "recordsPerSecond": "2.5"}) == ClickSource(10, 2.5)


def test_an_option_that_does_not_exist_or_does_not_fit_is_refused():
    with pytest.raises(UnknownOption, match="'recordsPerSecond'"):
        clicks_from_options({"recordPerSecond": "1"})
    with pytest.raises(BuildError, match=r"recordsPerSecond .* above 0, not 0"):
        clicks_from_options({"recordsPerSecond": "0"})
    with pytest.raises(BuildError, match=r"partitions .* at least 1, not 0"):
        ClickSource(partitions=0)


def test_a_reader_says_which_split_a_batch_is_from_and_which_may_still_give_some():
    source = ClickSource(records=5, partitions=2, batch_rows=2)
    reader = open_reader(source, source.splits(1))
    zero, one = (split.id for split in source.splits(1))
    assert reader.open_splits() == {zero, one}
    seen = []
    while isinstance(reader.poll(), pa.RecordBatch):
        seen.append((reader.polled_split(), set(reader.open_splits())))

    assert seen == [(zero, {zero, one}), (one, {zero}), (zero, set())]
