"""Slurm from outside an allocation: write the batch file, submit it, watch the job, have it start again and go on."""
