"""The only room that imports pyspark: the session and its dialect, deployment, DataFrames."""
