"""The contracts a user meets: what a source, a sink and a query promise."""
