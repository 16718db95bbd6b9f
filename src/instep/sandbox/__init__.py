"""A practice cluster: real Debian machines, with systemd, sshd and Slurm, on one host."""
