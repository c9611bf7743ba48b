"""distdiag slurm: run a command repeatedly as SLURM jobs, and check that jobs still run or wait."""
