"""What became of checkpoints and attempts, asked for in pages, in columns and by barriers."""

import pytest


@pytest.fixture
def ask(quiet):
    driver, _ = quiet
    return lambda path: driver.client.get(f"/jobs/counts/{path}")


def test_a_page_of_checkpoints_is_older_than_the_one_named_and_of_one_status(ask):
    told = ask("checkpoints")
    newest, before, *_ = [each for each in told["history"] if each["status"] == "COMPLETED"]

    page = ask(f"checkpoints?limit=1&before={newest['id']}&status=completed")
    assert page["history"] == [before]
    assert page["counts"] == told["counts"]
    assert all(each["status"] == "FAILED" for each in ask("checkpoints?status=failed")["history"])


@pytest.mark.parametrize("wrong", ["limit=0", "limit=501", "before=0", "status=lost", "page=2"])
def test_a_page_that_cannot_be_is_refused(quiet, wrong):
    driver, _ = quiet

    assert driver.client.ask("GET", f"/jobs/counts/checkpoints?{wrong}").status == 400


def test_the_phases_of_every_checkpoint_are_its_duration(ask):
    told = ask("checkpoints/series")

    shown = {each["id"]: each for each in ask("checkpoints?limit=500")["history"]}
    assert set(told["id"]) <= set(shown)
    over = [place for place, status in enumerate(told["status"]) if status == "c"]
    assert len(over) >= 2
    for place in over:
        number = told["id"][place]
        spent = [told[name][place] for name in ("start", "align", "sync", "async", "store")]
        assert sum(spent) == pytest.approx(shown[number]["end_to_end_duration"], abs=1)
        assert told["new"][place] == shown[number]["checkpointed_size"]
    last = told["triggered"][-1]
    assert ask(f"checkpoints/series?from={last}&to={last}")["id"] == told["id"][-1:]


def test_barriers_are_told_by_sender_and_whoever_was_last_is_kept(ask, quiet):
    _, query = quiet
    number = query.summary.last_checkpoint

    told = ask(f"checkpoints/details/{number}/barriers")

    sources = [each for each in told["subtasks"] if each["last_from"] is None]
    counts = [each for each in told["subtasks"] if each["last_from"] is not None]
    assert (len(sources), len(counts)) == (2, 2)
    for each in counts:
        assert {(task, index) for task, index, _ in each["arrivals"]} == {
            ("read scripted", 0),
            ("read scripted", 1),
        }
        assert each["arrivals"][-1] == [*each["last_from"], each["last"]]
        assert each["first"] == each["arrivals"][0][2] <= each["last"] <= each["taken"]
        assert each["taken"] <= each["durable"]
    details = ask(f"checkpoints/details/{number}")
    path = details["stillframe"]["critical-path"]
    assert next(task for task, _ in path) == "read scripted"
    [vertex] = {each["vertex"] for each in counts}
    for part in ask(f"checkpoints/details/{number}/subtasks/{vertex}")["subtasks"]:
        assert part["stillframe"]["pid"] == query.slot_pids[part["index"]]
        assert part["stillframe"]["last_from"] == counts[part["index"]]["last_from"]


def test_what_a_checkpoint_holds_is_told_operator_by_operator(ask, quiet):
    _, query = quiet
    number = query.checkpoints[-1].checkpoint_id

    told = ask(f"checkpoints/details/{number}/operators")
    held = {each["uid"]: each for each in told["operators"]}

    assert held["count"]["states"] == ["aggregates"]
    assert (held["count"]["rows"], held["count"]["positions"]) == (7, [])
    assert held["count"]["bytes"] > 0
    positions = held["clicks"]["positions"]
    assert [each["id"] for each in positions] == ["script-0", "script-1"]
    assert all(each["position"] for each in positions)


def test_of_a_checkpoint_that_is_not_remembered_the_command_is_told_that_reads_it(quiet):
    driver, query = quiet
    savepoint = next(each for each in query.checkpoint_statistics.completed if each.is_savepoint)
    path = f"/jobs/counts/checkpoints/details/{savepoint.checkpoint_id}/operators"

    said = driver.client.ask("GET", path)

    assert said.status == 409
    assert said.error.endswith(f"stillframe inspect {savepoint.path}")


def test_attempts_tell_how_they_came_up_after_what(ask):
    second, first = ask("attempts")

    came = second["phases"]
    order = ("heard", "noticed", "begun", "slots", "running", "first_record", "caught_up")
    moments = [came[name] for name in order if came[name] is not None]
    assert moments == sorted(moments)
    assert came["noticed"] is not None
    assert came["running"] is not None
    assert first["ended"]["kind"] == "lost slot"
    assert (second["ended"], first["replayed"]) == (None, 0)
    assert second["replayed"] is not None
