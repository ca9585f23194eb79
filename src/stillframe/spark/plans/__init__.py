"""Reads the plans that Spark's analyzer makes: a node becomes an operator of ours."""
