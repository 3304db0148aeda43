"""The backend interface and its implementations: fake (numpy), torch (cpu and cuda), mlx."""
