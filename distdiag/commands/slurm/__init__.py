"""distdiag slurm: a command that SLURM runs again and again, and whether a job still runs or waits."""
