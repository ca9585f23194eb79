"""What is told of errors that other programs raise."""

import pytest

from stillframe.errors import telling_line

JAVA = """An error occurred while calling o363.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:3041)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (JAVA, "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in"
         " stage 1.0 failed"),
        (JAVA + "Caused by: java.net.ConnectException: Connection refused\n\tat java.base",
         "java.net.ConnectException: Connection refused"),
        (JAVA + "Caused by: x.PythonException: Traceback (most recent call last):\n  File ...\n"
         "ModuleNotFoundError: No module named 'shop'\n\tat org.apache",
         "ModuleNotFoundError: No module named 'shop'"),
        ("no room\nhint: elsewhere", "no room"),
        ("", ""),
    ],
)  # fmt: skip
def test_of_a_page_of_java_the_line_is_told_that_names_the_cause(text, told):
    assert telling_line(text) == told
