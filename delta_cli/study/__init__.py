"""Studies: a grid of methods and seeds on one task, run to the end and summed up with statistics."""
