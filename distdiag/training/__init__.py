"""What a training script imports, or has running inside of it. Standard library only, for old Pythons too; no torch
unless the script itself has it."""
