"""Functions and processors of a user's, over the keys of a stream."""
