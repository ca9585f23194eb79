"""Spark's own evaluator of expressions, in a JVM beside a slot."""
