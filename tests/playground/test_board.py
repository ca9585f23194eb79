"""What the board counts with: the truth, the numbers seen, and a naive sink's files."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.sinks import SinkContext
from stillframe.connectors.generate import clicks_table
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.playground.naive import NaiveSink
from stillframe.playground.numbers import NumbersSeen, Seen
from stillframe.playground.scoreboard import Prediction, Score, surplus
from stillframe.playground.truth import Truth, click_source


@pytest.mark.parametrize("stops", [(0, 0, 0, 0), (1, 70_000, 5, 0), (65_536, 131_072, 3, 200_000)])
def test_the_truth_is_what_the_generator_makes_before_the_positions(stops):
    source = click_source()
    positions = dict(enumerate(stops))
    expected: Counter[str] = Counter()
    for partition, stop in positions.items():
        expected.update(clicks_table(source, partition, 0, stop).column("app_id").to_pylist())
    assert Truth(source).counts(positions) == expected


def test_the_truth_may_be_asked_for_older_positions_again():
    truth = Truth(click_source())
    before = truth.counts({0: 1_000, 1: 70_000})
    truth.counts({0: 500_000, 1: 500_000})
    assert truth.counts({0: 1_000, 1: 70_000}) == before


def test_a_number_is_lost_doubled_or_behind_the_positions():
    seen = NumbersSeen()
    # Four partitions: 0 4 8 belong to the first, 1 5 to the second, 2 to the third.
    seen.add([np.array([0, 4, 8, 1, 5]), np.array([4, 2, 9, 9])])
    # 9 is index 2 of the second: behind its position, and there twice; 3 and 6 are missing.
    assert seen.against({}, {0: 3, 1: 2, 2: 2, 3: 1}) == Seen(rows=9, lost=2, doubled=2, behind=1)
    assert not seen.against({}, {0: 3, 1: 3, 2: 1}).is_exact


def test_numbers_before_the_base_need_not_be_there():
    seen = NumbersSeen()
    seen.add([np.array([8, 9, 10, 11])])
    base = dict.fromkeys(range(4), 2)
    assert seen.against(base, dict.fromkeys(range(4), 3)).is_exact
    assert seen.reached() == dict.fromkeys(range(4), 3)


def test_a_number_beyond_the_first_room_is_counted():
    seen = NumbersSeen()
    seen.add([np.array([3_000_000, 3_000_000])])
    assert seen.against({}, {}).doubled == 1


def test_a_wrong_count_makes_the_board_wrong_though_all_rows_are_there():
    right = Seen(10, 0, 0, 0)
    score = Score(1, 1, right, right, {"app-0001": 12}, {"app-0001": 10})
    assert not score.is_exact
    assert surplus(score.state, score.truth) == {"app-0001": 2}
    prediction = Prediction(1, score.surplus, 0, 7)
    assert "app-0001 will be wrong by +2" in prediction.sentence
    assert "the naive one 7" in prediction.sentence


def test_the_naive_sink_shows_the_rest_at_the_barrier_and_nothing_after_it_is_closed(tmp_path):
    context = SinkContext("job", Attempt(2), OperatorUid("naive"), SubtaskIndex(1))
    writer = NaiveSink(str(tmp_path / "shown")).open_writer(context)
    writer.write(pa.record_batch({"id": [1, 2]}))
    show = writer.rotate(CheckpointId(1))
    writer.write(pa.record_batch({"id": [3]}))
    assert list((tmp_path / "shown").iterdir()) == []
    assert list(show()) == []
    writer.close()
    (file,) = (tmp_path / "shown").iterdir()
    assert file.name == "2-1-000000.parquet"
    assert pq.read_table(file).column("id").to_pylist() == [1, 2]
