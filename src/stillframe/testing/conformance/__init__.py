"""Does your source, or your sink, keep its promises? Drawn schedules of failures find out."""

from stillframe.testing.conformance.promises import PromiseBroken, Report
from stillframe.testing.conformance.sinks import check_sink
from stillframe.testing.conformance.sources import check_source

__all__ = ["PromiseBroken", "Report", "check_sink", "check_source"]
