"""distdiag slurm: check that jobs still run or wait."""
