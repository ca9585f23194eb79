"""What operators remember: columns, key indexes, and the files they are snapshotted to."""
