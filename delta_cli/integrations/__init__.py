"""DelTA inside other people's trainers. Each module imports its trainer, and nothing here imports a module."""
