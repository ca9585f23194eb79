"""Checkpoints that refer to files of older ones, on real processes and a real disk."""

from pathlib import Path

from stillframe.protocol.manifests import decode_manifest


def job_directory(page_views):
    return Path(page_views.location) / "page-views"


def state_files(page_views):
    job = job_directory(page_views)
    return {str(file.relative_to(job)) for file in job.glob("shared/*/*")}


def retained(page_views):
    """The manifests on the disk, by checkpoint."""
    files = job_directory(page_views).glob("chk-*/_metadata")
    manifests = [decode_manifest(file.read_bytes()) for file in files]
    return {manifest.checkpoint_id: manifest for manifest in manifests}


def files_of(manifest):
    return {file.path for file in manifest.files()}


def bytes_of(manifest):
    """What was written, and what there is."""
    written = sum(timings.bytes_written for timings in manifest.timings)
    return written, sum(timings.state_bytes for timings in manifest.timings)


def test_an_idle_job_writes_no_state_again_and_restores_from_the_file_it_shares(page_views, until):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(
        page_views.plan(source), checkpointInterval="1 hour", checkpointsRetained="1"
    )
    running.wait_for_records(2_000)
    first = running.query.checkpoint(timeout=60)
    written = state_files(page_views)
    state_bytes = bytes_of(retained(page_views)[first])[1]
    assert len(written) == 2
    assert bytes_of(retained(page_views)[first]) == (state_bytes, state_bytes)

    running.query.checkpoint(timeout=60)
    last = running.query.checkpoint(timeout=60)
    until(lambda: len(list(job_directory(page_views).glob("chk-*"))) == 1)

    assert state_files(page_views) == written
    [(number, manifest)] = retained(page_views).items()
    assert number == last
    assert files_of(manifest) == written
    assert bytes_of(manifest) == (0, state_bytes)

    running.kill(0)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert [attempt.restored_from for attempt in running.attempts()] == [None, last]
    assert state_files(page_views) == files_of(*retained(page_views).values())


def test_a_file_goes_with_the_last_checkpoint_that_uses_it(page_views, until):
    between, gate = page_views.gate("between"), page_views.gate("second-half")
    source = page_views.three_parts(between, gate)
    running = page_views.start(
        page_views.plan(source), checkpointInterval="1 hour", checkpointsRetained="2"
    )
    running.wait_for_records(1_000)
    running.query.checkpoint(timeout=60)
    old = state_files(page_views)
    running.query.checkpoint(timeout=60)
    between.open()
    running.wait_for_records(2_000)

    running.query.checkpoint(timeout=60)
    assert old < state_files(page_views), "the checkpoint before this one still needs them"
    running.query.checkpoint(timeout=60)

    until(lambda: state_files(page_views).isdisjoint(old))
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)
