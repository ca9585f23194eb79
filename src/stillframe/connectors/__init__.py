"""Sources and sinks that come with Stillframe."""
