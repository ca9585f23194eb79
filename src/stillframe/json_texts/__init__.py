"""JSON as Spark reads it: texts in, typed columns out, and which rows are malformed."""
