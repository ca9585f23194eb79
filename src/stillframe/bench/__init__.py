"""Benchmarks of Stillframe beside Flink, PyFlink, Spark and Bytewax, in one run on one machine."""
