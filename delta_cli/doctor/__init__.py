"""What a run will need and whether this machine and these files can give it, before it starts."""
