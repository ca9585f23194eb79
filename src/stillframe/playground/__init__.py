"""The playground: a job to break, a board that knows the truth, and a tour of twelve steps."""
