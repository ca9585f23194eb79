"""The job as a graph of operators over Arrow schemas, and the plan made of it."""
