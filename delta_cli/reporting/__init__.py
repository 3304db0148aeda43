"""What a run looks like: the live display, a look at the token credit, reports, trackers."""
