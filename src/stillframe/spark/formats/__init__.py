"""What `format(...)` can mean: our formats, a user's class, Python data sources of Spark's."""
