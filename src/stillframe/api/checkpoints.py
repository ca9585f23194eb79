"""What a user's function may hear of checkpoints."""

from __future__ import annotations


class HearsOfCheckpoints:
    """Two methods that a function may have, to act on something when it is safe.

    A function that must not tell another system of records before they are counted for good notes
    them with the id that `on_snapshot` is given, and tells them when `on_checkpoint_complete` comes
    with that id or a higher one. A PySpark `StatefulProcessor` may have methods with these names
    too. Both are called by the thread that calls all other methods, so they must not block; no key
    is at hand. What they raise is an error of your code like any other.
    """

    def on_snapshot(self, checkpoint_id: int) -> None:
        """All that has come until now is in the checkpoint with this id, which may still fail.

        Called at each barrier, before the states are snapshotted: what is put into them here is in
        the snapshot. Savepoints have ids of the same row; they are never told as complete.
        """

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint with this id is complete: the job never goes back to before it.

        The exception is a person who restores an older checkpoint or savepoint by hand. Ids ascend;
        one that was aborted is never told. After a restart the first call is for the checkpoint
        that was restored, since the call before the failure may have been lost. That it is called
        for every checkpoint is not promised: a crash may come in between.

        The classic mistake is to act on all that has come by now: what came after `on_snapshot` of
        this id is not in the checkpoint, and comes again after a failure.
        """
