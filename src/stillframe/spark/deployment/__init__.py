"""From a session of Spark's to slots: what is checked, started, and watched."""
