"""For tests, ours and our users': scripted sources, a runner without Spark, a manual clock."""
