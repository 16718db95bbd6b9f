"""Ranks that mpirun or srun starts: each is a task that calls the launcher."""
