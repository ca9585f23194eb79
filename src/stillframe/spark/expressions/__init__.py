"""Spark's expressions, for Arrow columns or made ready for Spark's own evaluator."""
