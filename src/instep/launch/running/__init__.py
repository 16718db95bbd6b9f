"""One run while it goes on: watch its ranks, name the first failure, keep its logs and its record, tell the user."""
